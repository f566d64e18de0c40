"""Text in = text out, whatever the text; ids that no text yields; vocabularies of others."""

from __future__ import annotations

import io
import itertools
import math
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from diglot.errors import TextError
from diglot.subwords import CONTROL, NUM_RESERVED, Subwords, clean, learn, load_subwords

LOOKS_SPECIAL = ["</s>", "<s>", "<pad>", "<unk>", "<0x0A>", "<reserved3>", "a<pad>b", "</s></s>", "<0xE4>"]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def learnt(request: pytest.FixtureRequest, phrases: list[tuple[str, str]]) -> Subwords:
    return learn((text for pair in phrases for text in pair), 420, request.param)


def lines_of(phrases: Sequence[tuple[str, str]]) -> list[str]:
    return [text for pair in phrases for text in pair]


def as_read(text: str) -> str:
    """What SentencePiece keeps of a text: it writes a space as U+2581, so takes that for one, and runs as one."""
    return re.sub(" +", " ", clean(text).replace("\u2581", " ")).strip(" ")


def learn_elsewhere(lines: list[str], **options: object) -> bytes:
    """A vocabulary as SentencePiece learns it without diglot."""
    model = io.BytesIO()
    options = {"vocab_size": 90, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **options)
    return model.getvalue()


# ------------------------------------------------------------------- learning


def test_special_ids_come_first(learnt: Subwords) -> None:
    assert (learnt.pad_id, learnt.eos_id) == (0, 1)
    first = ["<pad>", "</s>", "<unk>", *(f"<reserved{i}>" for i in range(NUM_RESERVED)), "<0x00>"]
    assert NUM_RESERVED == 64
    assert learnt.words(range(len(first))) == first
    assert learnt.num_pieces == 420


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_learning_twice_gives_the_same_bytes(kind: str, phrases: list[tuple[str, str]]) -> None:
    assert learn(lines_of(phrases), 420, kind).proto == learn(lines_of(phrases), 420, kind).proto


def test_unigram_and_bpe_find_other_pieces(phrases: list[tuple[str, str]]) -> None:
    assert learn(lines_of(phrases), 420, "unigram") != learn(lines_of(phrases), 420, "bpe")


def test_one_vocabulary_serves_both_sides(learnt: Subwords, phrases: list[tuple[str, str]]) -> None:
    for side in zip(*phrases, strict=True):
        pieces = learnt.encode_all(side)
        assert tuple(map(learnt.decode, pieces)) == side
        assert sum(map(len, pieces)) < sum(map(len, side))


def test_a_small_text_gives_fewer_pieces_than_asked_for(phrases: list[tuple[str, str]]) -> None:
    small = learn(lines_of(phrases), 37_000)
    assert 420 < small.num_pieces < 37_000


def test_text_that_is_too_small_is_refused() -> None:
    with pytest.raises(TextError, match="cannot learn subwords from this text"):
        learn([], 400)


def test_text_without_spaces_is_learnt_as_well() -> None:
    who, what, whom = "我你他她", ("喜欢", "看见", "认识"), ("老师", "学生", "朋友", "苹果")
    lines = ["".join(parts) + "。" for parts in itertools.product(who, what, whom)]
    chinese = learn(lines, 400)
    assert all(chinese.decode(chinese.encode(line)) == line for line in lines)
    assert any(len(word.strip("\u2581")) > 1 for word in chinese.words(chinese.encode("我喜欢老师。")))


# ------------------------------------------------------------------- text in = text out


@given(st.text(max_size=40))
def test_any_text_comes_back_without_an_unknown_or_special_piece(learnt: Subwords, text: str) -> None:
    pieces = learnt.encode(text)
    assert learnt.decode(pieces) == as_read(text)
    assert all(piece >= 3 + NUM_RESERVED for piece in pieces)


@given(st.lists(st.text(max_size=20), max_size=5))
def test_many_texts_are_encoded_as_each_alone(subwords: Subwords, texts: list[str]) -> None:
    assert subwords.encode_all(texts) == [subwords.encode(text) for text in texts]


@pytest.mark.parametrize("text", LOOKS_SPECIAL)
def test_text_that_looks_like_a_special_piece_is_text(learnt: Subwords, text: str) -> None:
    pieces = learnt.encode(text)
    assert learnt.decode(pieces) == text
    assert not {learnt.pad_id, learnt.eos_id, *range(2, 3 + NUM_RESERVED)} & set(pieces)
    assert "<0x0A>" not in learnt.words(pieces)


def test_text_that_looks_special_is_text_even_where_it_was_learnt_from() -> None:
    lines = [f"{a} {b}" for a in LOOKS_SPECIAL for b in LOOKS_SPECIAL]
    odd = learn(lines, 420)
    for text in LOOKS_SPECIAL:
        assert odd.decode(odd.encode(text)) == text
        assert all(piece >= 3 + NUM_RESERVED for piece in odd.encode(text))


def test_control_characters_are_spaces(subwords: Subwords) -> None:
    for number in (*range(0x20), *range(0x7F, 0xA0)):
        assert CONTROL.fullmatch(chr(number))
        assert subwords.encode(f"one{chr(number)}two") == subwords.encode("one two")
        assert subwords.encode(chr(number)) == []


def test_what_is_no_control_character_is_kept(subwords: Subwords) -> None:
    text = "a\u00a0b\u3000c\u200bd\u2028e\ufefff\u200dg\u00adh\ufffdi"
    assert subwords.decode(subwords.encode(text)) == text


@pytest.mark.parametrize("text", ["fünf Äpfel", "Ångström", "한국어", "élève", "ệ", "zwölf Öfen"])
def test_composed_and_decomposed_text_are_the_same(subwords: Subwords, text: str) -> None:
    nfd, nfc = unicodedata.normalize("NFD", text), unicodedata.normalize("NFC", text)
    assert nfd != nfc
    assert subwords.encode(nfd) == subwords.encode(nfc)
    assert subwords.decode(subwords.encode(nfd)) == nfc


# ------------------------------------------------------------------- what a translation may not contain


def test_no_special_piece_is_writable_but_the_end(learnt: Subwords) -> None:
    unwritable = learnt.unwritable()
    names = learnt.words(unwritable)
    assert learnt.eos_id not in unwritable
    assert set(range(3 + NUM_RESERVED)) - {learnt.eos_id} <= set(unwritable)
    assert {f"<0x{number:02X}>" for number in (*range(0x20), 0x7F)} <= set(names)
    assert not {f"<0x{number:02X}>" for number in range(0x80, 0x100)} & set(names)


@given(st.data())
def test_no_writable_pieces_break_a_line(learnt: Subwords, data: st.DataObject) -> None:
    writable = sorted(set(range(learnt.num_pieces)) - set(learnt.unwritable()))
    text = learnt.decode(data.draw(st.lists(st.sampled_from(writable), max_size=30)))
    assert not set(text) & {chr(number) for number in (*range(0x20), 0x7F)}


def test_every_text_is_writable(learnt: Subwords, phrases: list[tuple[str, str]]) -> None:
    unwritable = set(learnt.unwritable())
    for text in (*lines_of(phrases[:50]), *LOOKS_SPECIAL, "好 ☃ 𝄞 \t\n"):
        assert not unwritable & set(learnt.encode(text))


# ------------------------------------------------------------------- vocabularies of others


def test_a_vocabulary_without_padding_is_padded_with_its_end(phrases: list[tuple[str, str]]) -> None:
    given_one = Subwords(learn_elsewhere(lines_of(phrases)))
    assert given_one.pad_id == given_one.eos_id == 2
    unwritable = given_one.words(given_one.unwritable())
    assert "</s>" not in unwritable
    assert {"<s>", "<unk>"} <= set(unwritable)
    assert given_one.decode(given_one.encode(phrases[0][0])) == phrases[0][0]


def test_a_vocabulary_with_padding_keeps_its_own_ids(phrases: list[tuple[str, str]]) -> None:
    given_one = Subwords(learn_elsewhere(lines_of(phrases), pad_id=3))
    assert (given_one.pad_id, given_one.eos_id) == (3, 2)
    assert 3 in given_one.unwritable()


def test_a_vocabulary_without_an_end_is_refused(phrases: list[tuple[str, str]]) -> None:
    with pytest.raises(TextError, match=r"has no end piece; train it with --eos_id=1"):
        Subwords(learn_elsewhere(lines_of(phrases), eos_id=-1))


def test_a_vocabulary_is_read_from_its_file(tmp_path: Path, subwords: Subwords) -> None:
    path = tmp_path / "subwords.model"
    path.write_bytes(subwords.proto)
    assert load_subwords(path) == subwords
    assert hash(load_subwords(path)) == hash(subwords)
    assert load_subwords(path) != learn(["another text"] * 9, 400)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"cannot read the subwords .*gone\.model: No such file or directory\."):
        load_subwords(tmp_path / "gone.model")


@pytest.mark.parametrize("content", [b"hello", b"\x00" * 100, b"PK\x03\x04", "ü".encode() * 50])
def test_a_file_that_is_no_vocabulary_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.model"
    path.write_bytes(content)
    with pytest.raises(TextError, match=r"odd\.model is not a SentencePiece model\."):
        load_subwords(path)


def test_an_empty_file_is_no_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "empty.model"
    path.touch()
    with pytest.raises(TextError, match=r"empty\.model is not a SentencePiece model\."):
        load_subwords(path)


@given(st.text(max_size=40), st.integers(0, 2**31))
def test_a_drawn_split_is_the_same_text(learnt: Subwords, text: str, seed: int) -> None:
    assert as_read(learnt.decode(learnt.encode_sampled(text, 0.3, seed))) == as_read(text)


def test_another_process_draws_the_same_splits(learnt: Subwords, tmp_path: Path) -> None:
    (tmp_path / "subwords.model").write_bytes(learnt.proto)
    code = (
        "import sys; from pathlib import Path; from diglot.subwords import load_subwords; "
        "drawn = load_subwords(Path(sys.argv[1])); "
        "print([drawn.encode_sampled('the day after next Friday', 0.3, seed) for seed in range(20)])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "subwords.model")]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert other == str([learnt.encode_sampled("the day after next Friday", 0.3, seed) for seed in range(20)])


def test_unigram_draws_splits_as_often_as_they_are_probable(subwords: Subwords) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=subwords.proto)
    text, alpha, num = "Friday", 0.4, 4000
    splits = [tuple(split) for split in processor.nbest_encode(text, nbest_size=512)]
    weight = {split: math.exp(alpha * sum(processor.get_score(piece) for piece in split)) for split in splits}
    drawn = Counter(tuple(subwords.encode_sampled(text, alpha, seed)) for seed in range(num))
    assert set(drawn) <= set(weight)
    for split in splits[:5]:
        share = weight[split] / sum(weight.values())
        assert drawn[split] / num == pytest.approx(share, abs=5 * (share * (1 - share) / num) ** 0.5 + 1e-9)


def test_bpe_draws_the_best_split_without_dropout_and_characters_with_all_of_it(
    phrases: list[tuple[str, str]],
) -> None:
    learnt = learn(lines_of(phrases), 420, "bpe")
    for text in lines_of(phrases)[:100]:
        assert learnt.encode_sampled(text, 0.0, 1) == learnt.encode(text)
        assert max(len(piece) for piece in learnt.words(learnt.encode_sampled(text, 1.0, 1))) == 1
