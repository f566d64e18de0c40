"""Segments: put together again they are the text; each fits; sentences are kept whole where they can be."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diglot.segments import Segment, split
from diglot.subwords import Subwords

Count = Callable[[str], int]

ENDS = [
    ". ",
    "! ",
    "? ",
    "...\n",
    '." ',
    ".) ",
    "。",
    "！”",
    "؟ ",
    ", ",
    "; ",
    "，",
    " ",
    "  ",
    "\t",
    "\n\n",
    "\u3000",
    "-",
]


def count_words(text: str) -> int:
    return len(text.split())


word = st.text(st.characters(categories=["L"], max_codepoint=0x500), min_size=1, max_size=8)
like_text = st.lists(st.tuples(word, st.sampled_from(ENDS)).map("".join), max_size=20).map("".join)
any_text = st.one_of(st.text(max_size=60), like_text, st.text("a. ,。\u0301\u3000", max_size=40))


def joined(lead: str, segments: list[Segment]) -> str:
    return lead + "".join(segment.text + segment.space for segment in segments)


def texts(text: str, limit: int, count: Count = count_words) -> list[str]:
    lead, segments = split(text, count, limit)
    assert joined(lead, segments) == text
    return [segment.text for segment in segments]


def is_one_cluster(text: str) -> bool:
    """One character with the marks upon it, which cannot be cut."""
    return all(unicodedata.category(character).startswith("M") for character in text[1:])


# ------------------------------------------------------------------- any text


@given(any_text, st.integers(1, 30), st.sampled_from([len, count_words]))
@example("", 1, len)
@example("a" * 50, 1, len)
@example("\u0301\u0301", 1, len)
def test_segments_put_together_are_the_text(text: str, limit: int, count: Count) -> None:
    lead, segments = split(text, count, limit)
    assert joined(lead, segments) == text
    assert not lead.strip()
    assert all(not segment.space.strip() and segment.text == segment.text.strip() for segment in segments)


@given(any_text, st.integers(1, 30), st.sampled_from([len, count_words]))
def test_every_segment_fits_or_is_one_character(text: str, limit: int, count: Count) -> None:
    for part in texts(text, limit, count):
        assert count(part) <= limit or is_one_cluster(part)


@given(any_text, st.integers(1, 30), st.sampled_from([len, count_words]))
def test_no_segment_is_empty(text: str, limit: int, count: Count) -> None:
    assert all(texts(text, limit, count))


@given(any_text)
def test_text_that_fits_is_one_segment(text: str) -> None:
    assert texts(text, max(1, len(text)), len) == ([text.strip()] if text.strip() else [])


@pytest.mark.parametrize("text", ["", " ", "\n", " \t\u3000\u00a0\r\n " * 9])
def test_white_space_alone_is_no_segment(text: str) -> None:
    assert split(text, len, 3) == (text, [])


# ------------------------------------------------------------------- sentences


sentence = st.lists(st.sampled_from(["alpha", "beta", "gamma", "delta", "omega"]), min_size=1, max_size=6).map(
    lambda words: " ".join(words).capitalize()
)


@given(
    st.lists(
        st.tuples(sentence, st.sampled_from([".", "!", "?", "...", '."', "?)"]), st.sampled_from([" ", "  ", "\n"]))
    ),
    st.integers(6, 15),
)
def test_sentences_that_fit_are_kept_whole_and_together(parts: list[tuple[str, str, str]], limit: int) -> None:
    ends = list(accumulate(len("".join(part)) for part in parts))
    text = "".join("".join(part) for part in parts)
    segments = split(text, count_words, limit)[1]
    cuts = list(accumulate(len(segment.text + segment.space) for segment in segments))
    assert set(cuts) <= set(ends)
    for start, cut in pairwise([0, *cuts]):
        following = min((end for end in ends if end > cut), default=None)
        assert following is None or count_words(text[start:following]) > limit


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("One two. Three four.", 2, ["One two.", "Three four."]),
        ("One two. Three four.", 3, ["One two.", "Three four."]),
        ("One two. Three four.", 4, ["One two. Three four."]),
        ('He said "No way." They left.', 4, ['He said "No way."', "They left."]),
        ("Is it so?! Perhaps... Yes it is!", 3, ["Is it so?!", "Perhaps...", "Yes it is!"]),
        ("She waited, hoped, and left at noon", 3, ["She waited, hoped,", "and left at", "noon"]),
        ("Version 1.2 is out. Version 3.4 is not.", 4, ["Version 1.2 is out.", "Version 3.4 is not."]),
        ("Куда ты идёшь? Домой иду.", 3, ["Куда ты идёшь?", "Домой иду."]),
    ],
)  # fmt: skip
def test_where_text_is_cut(text: str, limit: int, expected: list[str]) -> None:
    assert texts(text, limit) == expected


@pytest.mark.parametrize(
    "sentence",
    [
        "Tell Dr. Smith of it.",
        "Call Mrs. Brown at noon.",
        "Am St. Martin war es.",
        "Heute z. B. regnet es.",
        "Play J. S. Bach once more.",
        "He ate etc. and slept.",
        "So war es ca. ein Jahr.",
    ],
)
def test_an_abbreviation_is_no_end_of_a_sentence(sentence: str) -> None:
    """Where it were, its first words would be put to the sentence before."""
    before = "They came."
    limit = max(count_words(sentence), 2 + sentence[: sentence.index(".")].count(" ") + 1)
    assert texts(f"{before} {sentence} {before}", limit) == [before, sentence, before]


def test_sentences_of_chinese_end_without_a_space() -> None:
    assert texts("你好。我很好！你呢？他说：“走吧。”她走了。", 8, len) == [
        "你好。我很好！",
        "你呢？",
        "他说：“走吧。”",
        "她走了。",
    ]
    assert texts("我喜欢苹果，也喜欢梨", 6, len) == ["我喜欢苹果，", "也喜欢梨"]


@pytest.mark.parametrize("num", range(1, 15))
def test_any_amount_of_white_space_may_follow_a_sentence(num: int) -> None:
    for space in (" " * num, "\n" * num):
        assert texts(f"The first word.{space}The second word.", 4) == ["The first word.", "The second word."]


# ------------------------------------------------------------------- text without a place to cut


@pytest.mark.parametrize("unit", ["x", "好", "x, ", "Word. ", "。", "a.", "\u00e4\u0301", "\u3000x", "--"])
def test_a_million_characters_are_cut_in_bounded_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    begun = time.process_time()
    found = texts(text, 100, len)
    assert time.process_time() - begun < 5
    assert max(map(len, found)) <= 100


@pytest.mark.parametrize("unit", [".", "?!", "…"])
def test_the_time_for_a_row_of_marks_grows_with_its_length_alone(unit: str) -> None:
    begun = time.process_time()
    texts(unit * (10_000 // len(unit)), 100, len)
    assert time.process_time() - begun < 0.3  # a thousandth of a second is enough


@pytest.mark.parametrize(
    "letter",
    ["e\u0301", "a\u0323\u0302", "\u0e01\u0e31", "\u0e01\u0e38\u0e48", "\u0915\u093f", "\u0915\u0901", "\u05d0\u05b8"],
)
def test_a_mark_is_not_cut_from_its_letter(letter: str) -> None:
    for limit in range(len(letter), 12):
        assert all(set(part.replace(letter, "")) == set() for part in texts(letter * 30, limit, len))


def test_segments_fit_by_the_count_of_pieces(subwords: Subwords, phrases: list[tuple[str, str]]) -> None:
    def count(text: str) -> int:
        return len(subwords.encode(text)) + 1

    text = " ".join(f"{src.capitalize()}. {tgt}, 好好好!" for src, tgt in phrases[:60])
    for limit in (8, 20, 60):
        for part in texts(text, limit, count):
            assert count(part) <= limit or len(part) == 1
