"""Altered sources: each variant is what its name says, and the same every time."""

from __future__ import annotations

from collections import Counter

from diglot.robustness import LETTERS_A_SLIP, mistype, variants

LINES = ["A small dog runs fast.", "", "x", "Where is it?  Here. ", "ein langer Satz " * 20, "狗跑得很快。"]


def test_each_variant_is_what_its_name_says():
    found = variants(LINES, LINES)
    assert found["capitals"][0] == [line.upper() for line in LINES]
    assert found["small letters"][0] == [line.lower() for line in LINES]
    stops = ["A small dog runs fast", "", "x", "Where is it?  Here", ("ein langer Satz " * 20).strip(), "狗跑得很快"]
    assert found["no final stop"][0] == stops
    assert found["doubled spaces"][0][:4] == ["A  small  dog  runs  fast.", "", "x", "Where  is  it?    Here.  "]
    assert all(references == LINES for name, (_, references) in found.items() if name != "a sentence more")


def test_a_sentence_more_is_more_in_the_reference_too():
    src, ref = variants(["one", "two"], ["一。", "二。"], "zh")["a sentence more"]
    assert (src, ref) == (["one two", "two one"], ["一。二。", "二。一。"])
    assert variants(["one", "two"], ["eins", "zwei"], "de")["a sentence more"][1] == ["eins zwei", "zwei eins"]


def test_typing_errors_are_few_and_the_same_every_time():
    line = "the quick brown fox jumps over the lazy dog " * 10
    assert mistype(line, 3) == mistype(line, 3) != mistype(line, 4)
    assert [mistype(short, 1) for short in ("", "x", "12 34", ".")] == ["", "x", "12 34", "."]
    assert mistype("ab", 1) != "ab"
    wanted = sum(map(str.isalpha, line)) // LETTERS_A_SLIP
    for seed in range(20):
        one, two = Counter(line.split()), Counter(mistype(line, seed).split())
        assert 0 < (one - two).total() <= wanted
        assert abs(len(mistype(line, seed)) - len(line)) <= wanted
