"""Text files to pairs: what a line is, what is refused and where, and that nothing is dropped in silence."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import random
import re
import stat
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import diglot.corpus
import diglot.index
from diglot.config import DataConfig
from diglot.corpus import (
    MAKING,
    Corpus,
    TextFile,
    lines_to_learn_from,
    open_pairs,
    open_stream,
    read_lines,
    stream_lines,
    sweep_cache,
)
from diglot.demo import draw_corpus
from diglot.errors import TextError
from diglot.index import Reading, index_corpus
from diglot.subwords import LEARNING_BYTES, Subwords

Write = Callable[[str, str | bytes], Path]

WORDS = "one two three four five six seven eight nine ten eleven twelve".split()
NO_LINE_END = ["\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]  # but for str.splitlines


@dataclasses.dataclass
class Indexed:
    """A corpus, and the list of what was dropped as (reason, place)."""

    corpus: Corpus
    drops: list[tuple[str, str]]


def index(
    subwords: Subwords,
    src: Sequence[str | Path] = (),
    tgt: Sequence[str | Path] = (),
    tsv: Sequence[str | Path] = (),
    **options: object,
) -> Indexed:
    """Index files as training does."""
    files = open_pairs([str(p) for p in src], [str(p) for p in tgt], [str(p) for p in tsv])
    drops = io.StringIO()
    corpus = index_corpus(files, Reading(subwords, subwords, DataConfig(**options)), drops)  # type: ignore[arg-type]
    return Indexed(corpus, listed(drops))


def listed(drops: io.StringIO) -> list[tuple[str, str]]:
    lines = [line.split("\t") for line in drops.getvalue().split("\n")[:-1]]
    return [(reason, Path(place).name) for reason, place in lines]


def index_texts(write: Write, subwords: Subwords, pairs: Sequence[tuple[str, str]], **options: object) -> Indexed:
    """Index pairs, from two files."""
    paths = [write(name, "".join(pair[side] + "\n" for pair in pairs)) for side, name in enumerate(("src", "tgt"))]
    return index(subwords, paths[:1], paths[1:], **options)


def all_texts(corpus: Corpus) -> list[tuple[str, str]]:
    return list(zip(*corpus.texts(np.arange(len(corpus))), strict=True))


# ------------------------------------------------------------------- lines


@given(
    st.lists(st.text(st.one_of(st.sampled_from(NO_LINE_END), st.characters(codec="utf-8")), max_size=9)), st.booleans()
)
def test_lf_alone_ends_a_line(tmp_path_factory: pytest.TempPathFactory, texts: list[str], has_last_lf: bool) -> None:
    lines = [text.replace("\n", " ").removeprefix("\ufeff").rstrip("\r") for text in texts]
    if not has_last_lf and lines:
        lines[-1] += "end"
    path = tmp_path_factory.getbasetemp() / "lines"
    path.write_bytes("".join(line + "\n" for line in lines).removesuffix("" if has_last_lf else "\n").encode())
    file = TextFile(path)
    assert list(file.lines()) == read_lines(path) == lines
    assert file.num_lines == len(lines)
    with open_stream(path) as stream:
        assert list(stream_lines(stream, "lines")) == lines


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\xef\xbb\xbf", []),
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"a", ["a"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\n\r\n", ["a", ""]),
        (b"a\rb\r\r\n", ["a\rb\r"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"\xef\xbb\xbf\n", [""]),
        (b"a\0b\x01\n\0\n", ["a\0b\x01", "\0"]),
    ],
)
def test_lines_of_odd_files(write: Write, content: bytes, lines: list[str]) -> None:
    path = write("file", content)
    assert read_lines(path) == lines
    assert TextFile(path).num_lines == len(lines)
    if content != b"\xef\xbb\xbf":  # of a stream the mark alone is a line, because it has been read
        with open_stream(path) as stream:
            assert list(stream_lines(stream, "file")) == lines


# ------------------------------------------------------------------- what is refused


@given(
    st.text(max_size=30),
    st.sampled_from(
        [b"\x80", b"\xff", b"\xc3(", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\xe4bc"]
    ),
    st.text(max_size=10),
    st.sampled_from([1, 2, 3, 5, 8, 1 << 24]),
    st.booleans(),
)
def test_what_is_not_utf8_is_named_by_file_line_and_byte(
    tmp_path_factory: pytest.TempPathFactory, before: str, bad: bytes, after: str, block: int, has_bom: bool
) -> None:
    content = b"\xef\xbb\xbf" * has_bom + before.encode() + bad + after.encode()
    path = tmp_path_factory.getbasetemp() / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(UnicodeDecodeError) as expected:
        content.decode()
    at = expected.value.start
    line, byte = content[:at].count(b"\n") + 1, at - content[:at].rfind(b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diglot.corpus, "BLOCK", block)
        with pytest.raises(TextError) as caught:
            read_lines(path)
    assert str(caught.value).startswith(f"{path}, line {line}, byte {byte}: 0x{content[at]:02X} is not UTF-8; convert")


@given(st.text(max_size=60), st.sampled_from([1, 2, 3, 5]))
def test_a_character_on_the_border_of_a_block_is_whole(
    tmp_path_factory: pytest.TempPathFactory, text: str, block: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "good.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diglot.corpus, "BLOCK", block)
        assert TextFile(path).num_lines == text.count("\n") + (text[-1:] not in ("", "\n")) - (text == "\ufeff")


def test_a_stream_that_is_not_utf8_is_named_by_line_and_byte() -> None:
    lines = stream_lines(io.BytesIO(b"good\nna\xefve\n"), "standard input")
    assert next(lines) == "good"
    with pytest.raises(TextError, match=r"^standard input, line 2, byte 3: 0xEF is not UTF-8; convert"):
        next(lines)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_refused_by_name(write: Write, encoding: str) -> None:
    path = write("wide.txt", ("\ufeff" if encoding != "utf-16" else "").encode(encoding) + "ein Haus".encode(encoding))
    with pytest.raises(TextError, match=r"wide\.txt is UTF-16; convert it, as with: iconv -f UTF-16"):
        read_lines(path)


@pytest.mark.parametrize("open_it", [TextFile, open_stream])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, open_it: Callable[[Path], object]) -> None:
    for path, words in (
        (tmp_path / "gone.txt", "No such file"),
        (tmp_path / "gone.gz", "No such file"),
        (tmp_path, "Is a"),
    ):
        with pytest.raises(TextError, match=rf"^cannot read {re.escape(str(path))}: {words}"):
            open_it(path)


def test_a_tsv_line_without_a_tab_is_named(write: Write, subwords: Subwords) -> None:
    path = write("pairs.tsv", "one\teins\ntwo zwei\n")
    with pytest.raises(TextError, match=r"pairs\.tsv, line 2: no TAB between source and target\."):
        index(subwords, tsv=[path])


# ------------------------------------------------------------------- compressed files


@pytest.mark.parametrize("has_scratch", [False, True])
def test_a_compressed_file_reads_as_the_file_itself(write: Write, tmp_path: Path, has_scratch: bool) -> None:
    text = "ein Haus\r\nzwei Häuser\n\ndrei"
    plain, packed = write("text.de", text), write("text.de.gz", gzip.compress(text.encode()))
    scratch = tmp_path / "run" / "text" if has_scratch else None
    assert list(TextFile(packed, scratch).lines()) == read_lines(plain)
    assert not scratch or len(list(scratch.iterdir())) == 1
    with open_stream(packed) as stream:
        assert list(stream_lines(stream, "text")) == read_lines(plain)


def test_compressed_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    files: list[TextFile] = []
    for name in ("a", "b"):
        path = tmp_path / name / "text.gz"
        path.parent.mkdir()
        path.write_bytes(gzip.compress(name.encode()))
        files.append(TextFile(path, tmp_path / "scratch"))
    assert [list(file.lines()) for file in files] == [["a"], ["b"]]


def test_pairs_are_read_from_a_compressed_tsv(write: Write, subwords: Subwords) -> None:
    path = write("pairs.tsv.gz", gzip.compress(b"one\teins\ntwo\tzwei\n"))
    assert all_texts(index(subwords, tsv=[path]).corpus) == [("one", "eins"), ("two", "zwei")]


@pytest.mark.parametrize("kind", ["cut", "flipped", "no gzip", "empty"])
@pytest.mark.parametrize("has_scratch", [False, True])
def test_a_broken_compressed_file_is_named(write: Write, tmp_path: Path, kind: str, has_scratch: bool) -> None:
    whole = gzip.compress("\n".join(WORDS * 20).encode(), mtime=0)
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # in the checksum
    content = {"cut": whole[:40], "flipped": bytes(flipped), "no gzip": b"plain text\n", "empty": b""}[kind]
    path = write("text.gz", content)
    if kind == "empty":  # as gzip itself has it
        assert TextFile(path).num_lines == 0
        return
    with pytest.raises(TextError, match=r"cannot unpack .*text\.gz"):
        TextFile(path, tmp_path / "scratch" if has_scratch else None)


@pytest.mark.parametrize("kind", ["cut", "no gzip"])
def test_a_broken_compressed_stream_is_named(write: Write, kind: str) -> None:
    whole = gzip.compress("\n".join(WORDS * 20).encode(), mtime=0)
    path = write("text.gz", whole[:40] if kind == "cut" else b"plain text\n")
    with pytest.raises(TextError, match=r"text\.gz"), open_stream(path) as stream:
        list(stream_lines(stream, str(path)))


# ------------------------------------------------------------------- pairs


def test_several_files_are_one_corpus_in_order(write: Write, subwords: Subwords) -> None:
    src = [write("a.en", "one\ntwo\n"), write("b.en", "three")]
    tgt = [write("a.de", "eins\nzwei\n"), write("b.de", "drei\n")]
    tsv = [write("c.tsv", "four\tvier\n"), write("d.tsv", "five\tfünf\n\tnone\n")]
    found = index(subwords, src, tgt, tsv)
    expected = [("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four", "vier"), ("five", "fünf")]
    assert all_texts(found.corpus) == expected
    assert found.drops == [("empty", "d.tsv:2")]


def test_further_columns_of_a_tsv_are_passed_over(write: Write, subwords: Subwords) -> None:
    path = write("pairs.tsv", b"\xef\xbb\xbfone\teins\tCC BY\t3\r\ntwo\tzwei\t\nthree\tdrei\r\n")
    assert all_texts(index(subwords, tsv=[path]).corpus) == [("one", "eins"), ("two", "zwei"), ("three", "drei")]


def test_texts_are_exactly_what_stands_in_the_files(write: Write, subwords: Subwords) -> None:
    pairs = [("  a\0b \u2028", "\u00a0c\rd"), ("e\u0301", "é"), ("\tx", "y\t"), ("</s>", "<pad>")]
    corpus = index_texts(write, subwords, pairs).corpus
    assert all_texts(corpus) == pairs
    assert corpus.texts(np.array([2, 0, 2])) == (["\tx", "  a\0b \u2028", "\tx"], ["y\t", "\u00a0c\rd", "y\t"])
    assert corpus.texts(np.arange(0)) == ([], [])


def test_pieces_are_counted_with_the_end_piece(
    write: Write, subwords: Subwords, phrases: list[tuple[str, str]]
) -> None:
    corpus = index_texts(write, subwords, phrases).corpus
    assert all_texts(corpus) == phrases
    for side, lengths in enumerate(corpus.lengths(np.arange(len(corpus)))):
        assert lengths.tolist() == [len(subwords.encode(pair[side])) + 1 for pair in phrases]
        assert corpus.count_lengths()[side][: lengths.max() + 1].tolist() == np.bincount(lengths).tolist()


def test_a_tag_is_a_piece_of_the_source(write: Write, subwords: Subwords) -> None:
    files = open_pairs([], [], [str(write("a.tsv", "one hundred and one\teins\n"))])
    num = len(subwords.encode("one hundred and one")) + 1
    for has_tags, limit, kept in ((False, num, 1), (True, num, 0), (True, num + 1, 1)):
        reading = Reading(subwords, subwords, DataConfig(max_pieces=limit), has_tags)
        corpus = index_corpus(files, reading, io.StringIO())
        assert len(corpus) == kept
        assert corpus.lengths(np.arange(kept))[0].tolist() == [num + has_tags] * kept


# ------------------------------------------------------------------- unequal numbers of lines


def lines_run_apart(write: Write, src: list[str], tgt: list[str]) -> int:
    """The line that the refusal names, from 0; it must tell both counts."""
    paths = [write(name, "".join(line + "\n" for line in lines)) for name, lines in (("src", src), ("tgt", tgt))]
    with pytest.raises(TextError) as caught:
        open_pairs([str(paths[0])], [str(paths[1])])[0].check()
    message = str(caught.value)
    assert f"{paths[0]} has {len(src):,} lines and {paths[1]} has {len(tgt):,}; they must match" in message
    found = re.search(r"run apart at line ([\d,]+): look there", message)
    assert found, message
    return int(found[1].replace(",", "")) - 1


@pytest.mark.parametrize("place", [0, 1, 150, 600, 1050, 1198, 1199])
@pytest.mark.parametrize("side", [0, 1])
def test_a_missing_line_is_found(write: Write, place: int, side: int) -> None:
    sides = [list(lines) for lines in zip(*draw_corpus(1200, seed=3), strict=True)]
    del sides[side][place]
    assert abs(lines_run_apart(write, *sides) - place) <= 3


@pytest.mark.parametrize("name", ["multi30k/valid", "europarl_en_de/valid"])
def test_missing_lines_of_real_text_are_found(write: Write, data: Path, name: str) -> None:
    sides = [read_lines(data / f"{name}.{language}")[:1000] for language in ("en", "de")]
    for place in random.Random(1).sample(range(990), 8):
        for side, num in ((0, 1), (1, 1), (0, 4)):
            cut = [list(lines) for lines in sides]
            del cut[side][place : place + num]
            assert abs(lines_run_apart(write, *cut) - place) <= 4


def test_an_empty_side_is_refused_with_both_counts(write: Write) -> None:
    with pytest.raises(TextError, match=r"src has 1,200 lines and .*tgt has 0; they must match line by line\.$"):
        open_pairs([str(write("src", "a\n" * 1200))], [str(write("tgt", ""))])[0].check()


def test_equal_numbers_of_lines_pass(write: Write) -> None:
    for one, two in (("", ""), ("a\nb", "c\nd\n"), ("\n", "a\r\n")):
        (pair,) = open_pairs([str(write("src", one))], [str(write("tgt", two))])
        pair.check()


# ------------------------------------------------------------------- filters


def test_each_filter_counts_and_names_what_it_drops(write: Write, subwords: Subwords) -> None:
    pairs = [
        ("one", "drei"),
        ("", "drei"),  # 2
        ("three", " \t\0"),  # 3
        ("four " * 20, "vier"),  # 4
        ("five", "vier " * 20),  # 5
        ("six", "sechshundertsechs"),  # 6
        ("one", "drei"),  # 7
        ("Seven", "Seven"),  # 8
        ("one", "vier"),
        (" one", "drei "),  # 10
        ("x" * 3000, "y"),  # 11
    ]
    expected = {
        "empty": ["src:2", "src:3"],
        "too long": ["src:4", "src:5", "src:11"],
        "length ratio": ["src:6"],
        "duplicate": ["src:7", "src:10"],
        "same text": ["src:8"],
    }
    found = index_texts(write, subwords, pairs, max_pieces=20, max_ratio=3.0, drop_duplicates=True, drop_same=True)
    assert all_texts(found.corpus) == [("one", "drei"), ("one", "vier")]
    assert found.corpus.dropped == {reason: len(places) for reason, places in expected.items()}
    assert sorted(found.drops) == sorted((reason, place) for reason, places in expected.items() for place in places)


def test_no_filter_drops_a_duplicate_or_the_same_text_unasked(write: Write, subwords: Subwords) -> None:
    pairs = [("one", "one"), ("two", "zwei"), ("two", "zwei")]
    found = index_texts(write, subwords, pairs)
    assert all_texts(found.corpus) == pairs
    assert not found.drops
    assert not found.corpus.dropped


def test_a_filter_that_drops_nothing_counts_nothing(write: Write, subwords: Subwords) -> None:
    found = index_texts(write, subwords, [("one", "eins")], drop_duplicates=True, drop_same=True)
    assert not found.corpus.dropped


@pytest.mark.parametrize("option", ["max_pieces", "max_ratio"])
def test_a_pair_at_the_limit_is_kept(write: Write, subwords: Subwords, option: str) -> None:
    pair = ("one hundred and one", "eins")
    one, two = (len(subwords.encode(text)) + 1 for text in pair)
    limit = one if option == "max_pieces" else one / two
    for text in (pair, pair[::-1]):
        assert len(index_texts(write, subwords, [text], **{option: limit}).corpus) == 1
        smaller = limit - 1 if option == "max_pieces" else limit * 0.999
        assert len(index_texts(write, subwords, [text], **{option: smaller}).corpus) == 0


some_text = st.one_of(
    st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), st.sampled_from(["", " ", "\0", "x" * 2000])
)


@given(
    st.lists(st.tuples(some_text, some_text), max_size=12), st.booleans(), st.booleans(), st.sampled_from([1, 3, 100])
)
def test_what_is_kept_and_what_is_dropped_are_all_lines(
    tmp_path_factory: pytest.TempPathFactory,
    subwords: Subwords,
    pairs: list[tuple[str, str]],
    drop_duplicates: bool,
    drop_same: bool,
    at_once: int,
) -> None:
    directory = tmp_path_factory.getbasetemp()
    for side, name in enumerate(("src", "tgt")):
        (directory / name).write_text("".join(pair[side] + "\n" for pair in pairs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diglot.index, "LINES_AT_ONCE", at_once)
        patch.setattr(diglot.index, "ROWS_AT_ONCE", at_once)
        found = index(
            subwords, [directory / "src"], [directory / "tgt"], max_pieces=24, max_ratio=3.0,
            drop_duplicates=drop_duplicates, drop_same=drop_same,
        )  # fmt: skip
    kept = [int(found.corpus.where(row).rpartition(":")[2]) for row in range(len(found.corpus))]
    dropped = [int(place.removeprefix("src:")) for _, place in found.drops]
    assert sorted(kept + dropped) == list(range(1, len(pairs) + 1))
    assert kept == sorted(kept)
    assert all_texts(found.corpus) == [pairs[line - 1] for line in kept]
    assert Counter(reason for reason, _ in found.drops) == found.corpus.dropped + Counter()


def test_progress_adds_up_to_the_number_of_lines(
    write: Write, subwords: Subwords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diglot.index, "LINES_AT_ONCE", 3)
    for num_words, num_empty in ((0, 0), (3, 0), (7, 0), (2, 4), (7, 7)):
        path = write("pairs.tsv", "one\teins\n" * num_words + "\t\n" * num_empty)
        steps: list[int] = []
        totals: list[int] = []

        @contextmanager
        def progress(
            what: str, total: int, totals: list[int] = totals, steps: list[int] = steps
        ) -> Generator[Callable[[int, str], None]]:
            totals.append(total)
            yield lambda number, note: steps.append(number)

        reading = Reading(subwords, subwords, DataConfig())
        index_corpus(open_pairs([], [], [str(path)]), reading, io.StringIO(), progress)
        assert totals == [sum(steps)] == [num_words + num_empty]


def test_a_line_of_a_million_characters_costs_a_count_and_no_memory(write: Write, subwords: Subwords) -> None:
    src = write("src", b"one\n" + b"a word " * 150_000 + b"\ntwo\n")
    tgt = write("tgt", b"eins\nein Wort\nzwei\n")
    files = open_pairs([str(src)], [str(tgt)])
    drops = io.StringIO()
    files[0].check()  # reads blocks of a fixed size
    tracemalloc.start()
    try:
        corpus = index_corpus(files, Reading(subwords, subwords, DataConfig()), drops)
        lines = list(lines_to_learn_from(files, True, True))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000
    assert corpus.dropped == {"too long": 1}
    assert listed(drops) == [("too long", "src:2")]
    assert all_texts(corpus) == [("one", "eins"), ("two", "zwei")]
    assert lines == ["one", "eins", "ein Wort", "two", "zwei"]


def test_subwords_are_learnt_from_either_side_or_both(write: Write) -> None:
    long = "x" * (LEARNING_BYTES + 1)
    files = open_pairs([str(write("src", f"one\n{long}\n"))], [str(write("tgt", "eins\nzwei\n"))])
    assert list(lines_to_learn_from(files, True, False)) == ["one"]
    assert list(lines_to_learn_from(files, False, True)) == ["eins", "zwei"]
    assert list(lines_to_learn_from(files, True, True)) == ["one", "eins", "zwei"]


@pytest.mark.parametrize(("num", "limit"), [(10, 9), (10, 10), (1000, 300), (1000, 999), (1000, 1001)])
def test_of_many_lines_as_many_as_allowed_are_learnt_from_evenly_spread(
    write: Write, monkeypatch: pytest.MonkeyPatch, num: int, limit: int
) -> None:
    monkeypatch.setattr(diglot.corpus, "LEARNING_LINES", limit)
    paths = [str(write(str(start), "".join(f"{start + i}\n" for i in range(num)))) for start in (0, num)]
    files = open_pairs(paths, paths)
    for sides in ((True, False), (True, True)):
        lines = [*map(int, lines_to_learn_from(files, *sides))][:: sum(sides)]
        assert len(lines) == min(2 * num, limit // sum(sides))
        gaps = np.diff(lines)
        assert gaps.max() - gaps.min() <= 1


# ------------------------------------------------------------------- holding out


def with_repeated_sources() -> list[tuple[str, str]]:
    """Each source stands one to four times, with other targets."""
    return [(word, f"{word} {other}") for i, word in enumerate(WORDS) for other in WORDS[: i % 4 + 1]]


@pytest.mark.parametrize("num", [0, 1, 5, 12, 100])
def test_pairs_are_held_out_with_all_pairs_of_the_same_source(write: Write, subwords: Subwords, num: int) -> None:
    pairs = with_repeated_sources()
    found = index_texts(write, subwords, pairs)
    drops = io.StringIO()
    src, tgt, files = found.corpus.hold_out(num, 1, drops)
    assert files == [0] * len(src)
    assert len(src) == len(set(src)) == min(num, len(WORDS))
    assert set(zip(src, tgt, strict=True)) <= set(pairs)
    kept = all_texts(found.corpus)
    assert kept == [pair for pair in pairs if pair[0] not in src]
    assert len(kept) + found.corpus.dropped["held out"] == len(pairs)
    assert [reason for reason, _ in listed(drops)] == ["held out"] * (len(pairs) - len(kept))


def test_what_is_held_out_follows_from_the_seed(write: Write, subwords: Subwords) -> None:
    def held_out(seed: int) -> tuple[list[str], list[str], list[int]]:
        return index_texts(write, subwords, with_repeated_sources()).corpus.hold_out(4, seed, io.StringIO())

    assert held_out(1) == held_out(1)
    assert len({str(held_out(seed)) for seed in range(5)}) > 1


# ------------------------------------------------------------------- the fingerprint


def test_the_fingerprint_is_of_the_text_and_its_order_and_not_of_the_files(write: Write, subwords: Subwords) -> None:
    pairs = [("one", "eins"), ("two", "zwei"), ("three", "drei")]

    def fingerprint(pairs: Sequence[tuple[str, str]]) -> str:
        return index_texts(write, subwords, pairs).corpus.fingerprint()

    whole = fingerprint(pairs)
    assert fingerprint(pairs) == whole
    tsv = [write(f"{i}.tsv", "\t".join(pair) + "\n") for i, pair in enumerate(pairs)]
    assert index(subwords, tsv=tsv).corpus.fingerprint() == whole
    others = (
        pairs[::-1],
        pairs[:2],
        [*pairs, pairs[0]],
        [("one", "eins"), ("two", "zwei"), ("three", "vier")],
        [("one", "eins"), ("Two", "zwei"), ("three", "drei")],
        [("one", "zwei"), ("two", "eins"), ("three", "drei")],
        [(tgt, src) for src, tgt in pairs],
    )
    assert len({whole, *map(fingerprint, others)}) == 1 + len(others)


# ------------------------------------------------------------------- the index is made once


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_the_cache_is_readable_as_the_umask_says(tmp_path: Path, write: Write, subwords: Subwords, mask: int) -> None:
    path, cache = write("a.tsv.gz", gzip.compress(b"one\teins\n")), tmp_path / "cache"
    before = os.umask(mask)
    try:
        files = open_pairs([], [], [str(path)], cache)
        index_corpus(files, Reading(subwords, subwords, DataConfig()), io.StringIO(), cache=cache)
    finally:
        os.umask(before)
    found = [cache, *cache.rglob("*")]
    assert {path.name.partition("-")[0] for path in cache.iterdir()} >= {"text", "index"}
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_an_index_is_made_once_for_a_text_its_subwords_and_its_filters(
    write: Write, subwords: Subwords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    made: list[Path] = []
    real = diglot.index.write_index

    def write_index(path: Path, *rest: object) -> None:
        made.append(path)
        real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(diglot.index, "write_index", write_index)

    def indexed(text: str, name: str = "a.tsv", **options: object) -> Indexed:
        files, drops = open_pairs([], [], [str(write(name, text))]), io.StringIO()
        reading = Reading(subwords, subwords, DataConfig(**options))  # type: ignore[arg-type]
        corpus = index_corpus(files, reading, drops, cache=tmp_path / "cache")
        return Indexed(corpus, listed(drops))

    text = "one\teins\n\tzwei\nthree\tdrei\n"
    first, again, elsewhere = indexed(text), indexed(text), indexed(text, "b.tsv")
    assert len(made) == 1
    assert all_texts(first.corpus) == all_texts(again.corpus) == all_texts(elsewhere.corpus)
    assert first.drops == again.drops == [("empty", "a.tsv:2")]
    assert elsewhere.drops == [("empty", "b.tsv:2")]
    assert first.corpus.dropped == again.corpus.dropped == {"empty": 1}
    assert first.corpus.fingerprint() == again.corpus.fingerprint()
    assert all_texts(indexed("one\tein\n\tzwei\nthree\tdrei\n").corpus)[0] == ("one", "ein")
    indexed(text, max_pieces=3)
    assert len(made) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 3  # and nothing half made


def test_what_was_left_half_made_is_swept_when_nobody_can_be_at_it_any_more(tmp_path: Path) -> None:
    """By the newest change within: a directory is as old as its newest file, not as its newest name."""
    day, ages = 24 * 3600, {"young": (0, 0), "being-written": (3, 0.5), "left": (3, 2), "other": (3, 2)}
    for name, days in ages.items():
        path = tmp_path / (name if name == "other" else f"{MAKING}index-{name}")
        path.mkdir()
        (path / "places").touch()
        for each, age in zip((path, path / "places"), days, strict=True):
            os.utime(each, (time.time() - age * day,) * 2)
    sweep_cache(tmp_path)
    assert {path.name.rpartition("index-")[2] for path in tmp_path.iterdir()} == {"young", "being-written", "other"}


def test_an_index_that_cannot_be_written_leaves_nothing(
    write: Write, subwords: Subwords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(diglot.index, "PLACES", "no/such")
    files = open_pairs([], [], [str(write("a.tsv", "one\teins\n"))])
    with pytest.raises(TextError, match=r"cannot write the index of the corpus to .*: No such file or directory"):
        index_corpus(files, Reading(subwords, subwords, DataConfig()), io.StringIO(), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("num_processes", [2, 3, 5])
@pytest.mark.parametrize("is_tsv", [False, True])
def test_the_index_does_not_depend_on_the_number_of_processes(
    write: Write, subwords: Subwords, monkeypatch: pytest.MonkeyPatch, num_processes: int, is_tsv: bool
) -> None:
    monkeypatch.setattr(diglot.index, "LINES_AT_ONCE", 7)
    pairs = [*draw_corpus(60, seed=1), ("", "leer"), ("x" * 3000, "y"), *draw_corpus(60, seed=1)]
    if is_tsv:
        files = open_pairs([], [], [str(write("a.tsv", "".join(f"{src}\t{tgt}\r\n" for src, tgt in pairs)))])
    else:
        paths = [write(name, "\ufeff" + "\n".join(pair[side] for pair in pairs)) for side, name in enumerate("ab")]
        files = open_pairs([str(paths[0])], [str(paths[1])])
    reading = Reading(subwords, subwords, DataConfig(max_pieces=60, max_ratio=2.0, drop_duplicates=True))
    found: list[tuple[str, list[tuple[str, str]], str]] = []
    for num in (1, num_processes):
        drops = io.StringIO()
        corpus = index_corpus(files * 2, reading, drops, num_processes=num)
        found.append((corpus.fingerprint(), all_texts(corpus), drops.getvalue()))
    assert found[0] == found[1]
    assert len(found[0][1]) > 10
    assert {reason for reason, _, _ in (line.partition("\t") for line in found[0][2].splitlines())} >= {
        "empty", "too long", "duplicate",
    }  # fmt: skip


def test_of_several_broken_lines_the_first_is_named_whichever_process_finds_it(
    write: Write, subwords: Subwords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diglot.index, "LINES_AT_ONCE", 3)
    lines = ["one\teins"] * 100
    lines[40] = lines[44] = lines[90] = "no tab"
    files = open_pairs([], [], [str(write("a.tsv", "\n".join(lines)))])
    with pytest.raises(TextError, match=r"a\.tsv, line 41: no TAB"):
        index_corpus(files, Reading(subwords, subwords, DataConfig()), io.StringIO(), num_processes=3)


def test_a_file_that_has_not_changed_is_not_hashed_again(write: Write, tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", write("a", "one\n")
    old = path.stat().st_mtime - 100
    digest = TextFile(path, cache).digest
    assert not list(cache.iterdir())  # it has only just been written, and may be again at the same instant
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diglot.corpus, "SECONDS_TO_SETTLE", -1)
        assert TextFile(path, cache).digest == digest
        (known,) = cache.iterdir()
        known.write_text("f" * 64)
        assert TextFile(path, cache).digest == "f" * 64
        path.write_text("two\n")
        os.utime(path, (old, old))  # as an unpacked archive does, which keeps its times
        assert TextFile(path, cache).digest not in (digest, "f" * 64)


def test_a_corpus_without_its_held_out_pairs_knows_the_place_of_each(write: Write, subwords: Subwords) -> None:
    src = [write("a", "".join(f"{word} {i}\n" for i, word in enumerate(WORDS))), write("b", "one 0\nnine\n")]
    found = index(subwords, src, src)
    found.corpus.hold_out(5, 3, io.StringIO())
    rows = np.arange(len(found.corpus))
    texts = found.corpus.texts(rows)[0]
    lines = {f"{path.name}:{i + 1}": line for path in src for i, line in enumerate(path.read_text().splitlines())}
    assert [lines[found.corpus.where(row).rpartition("/")[2]] for row in rows.tolist()] == texts
    groups = found.corpus.groups(DataConfig())
    num_of_first = found.corpus.files_of(rows).count(0)
    assert groups == [(0, num_of_first, 1.0), (num_of_first, len(rows), 1.0)][: len(groups)]
    assert found.corpus.lengths(rows)[0].tolist() == [len(subwords.encode(text)) + 1 for text in texts]


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_weights_and_temperature_share_an_epoch_out(write: Write, subwords: Subwords, temperature: float) -> None:
    sizes, weights = (8, 2, 30), (1.0, 4.0, 0.5)
    tsv = [write(f"{i}.tsv", "one\teins\n" * size) for i, size in enumerate(sizes)]
    corpus = index(subwords, tsv=tsv).corpus
    names = tuple(map(str, tsv))
    groups = corpus.groups(DataConfig(tsv=names, weights=weights, temperature=temperature))
    # Arivazhagan et al. 2019: a corpus is drawn with a probability as its share to the power of 1 / T
    shares = [size * weight for size, weight in zip(sizes, weights, strict=True)]
    powers = [(share / sum(shares)) ** (1 / temperature) for share in shares]
    for (start, end, times), size, power in zip(groups, sizes, powers, strict=True):
        assert end - start == size
        assert times * size == pytest.approx(sum(shares) * power / sum(powers))
