"""Planted leaks are found, all of them and no others."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from diglot.corpus import open_pairs
from diglot.leaks import LINES_AT_ONCE, SIMILAR, SIZE, Leaks, find_leaks

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_lines(num: int, seed: int) -> list[str]:
    """Sentences of random words, so that no two are near by chance."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(LETTERS, k=rng.randint(2, 9))) for _ in range(3000)]
    return [" ".join(rng.choices(words, k=rng.randint(9, 14))) for _ in range(num)]


def similarity(one: str, two: str) -> float:
    """Jaccard's, of the shingles as the module's words say it."""
    keys = ("".join(c for c in text.casefold() if c.isalnum()).encode() + bytes(SIZE - 1) for text in (one, two))
    a, b = ({key[i : i + SIZE] for i in range(len(key) - SIZE + 1)} for key in keys)
    return len(a & b) / len(a | b)


def leaks_of(path: Path, test: list[str], train: list[str], other: list[str] | None = None) -> Leaks | None:
    (path / "src").write_text("".join(line + "\n" for line in train))
    (path / "tgt").write_text("".join(line + "\n" for line in other or train))
    pairs = open_pairs([str(path / "src")], [str(path / "tgt")])
    return find_leaks((test, None), pairs, lambda steps, note: None)[0]


def test_planted_lines_are_found_and_no_others(tmp_path: Path):
    test, train = draw_lines(60, seed=1), draw_lines(LINES_AT_ONCE + 500, seed=2)
    train[3] = test[5]
    train[LINES_AT_ONCE + 2] = f"  {test[6]} "  # of the second block
    words = test[7].split()
    train[50] = " ".join([*words[:4], "other", *words[5:]])
    train[60] = test[8].upper().replace(" ", "  ") + " ."
    train[70] = test[9][:20] + test[9][21:]
    train[80] = " ".join(test[10].split()[:3])  # a part of it alone
    train[90], train[91] = test[11] + "!", test[11]  # nearly, and exactly
    assert leaks_of(tmp_path, test, train) == Leaks([5, 6, 11], [7, 8, 9])


def test_what_is_near_is_what_comparing_all_with_all_says(tmp_path: Path):
    rng, test = random.Random(3), draw_lines(25, seed=4)
    train: list[str] = []
    for line in test:  # one to eight words are others: some are near, some are not
        words = line.split()
        for place in rng.sample(range(len(words)), rng.randint(1, 8)):
            words[place] = "".join(rng.choices(LETTERS, k=len(words[place])))
        train.append(" ".join(words))
    near = [i for i, line in enumerate(test) if any(similarity(line, other) >= SIMILAR for other in train)]
    assert 3 < len(near) < 22
    assert leaks_of(tmp_path, test, train) == Leaks([], near)


def test_each_side_is_looked_for_in_its_own(tmp_path: Path):
    src, ref, train = (draw_lines(20, seed=seed) for seed in (5, 6, 7))
    (tmp_path / "text.tsv").write_text(
        "".join(f"{a}\t{b}\tnote\n" for a, b in zip(train, [*ref[:2], *train[2:]], strict=True))
    )
    with gzip.open(tmp_path / "more.src.gz", "wt") as file:
        file.write(f"{src[9]}\n")
    (tmp_path / "more.tgt").write_text(f"{src[0]}\n")  # a source among the targets is no leak
    pairs = open_pairs([str(tmp_path / "more.src.gz")], [str(tmp_path / "more.tgt")], [str(tmp_path / "text.tsv")])
    steps: list[int] = []
    assert find_leaks((src, ref), pairs, lambda num, note: steps.append(num)) == [Leaks([9], []), Leaks([0, 1], [])]
    assert sum(steps) == 21


@pytest.mark.parametrize("line", ["Ja.", "好", "我昨天去了北京，今天回来。", "ÄÖÜ straße"])
def test_short_lines_and_other_scripts(tmp_path: Path, line: str):
    train = draw_lines(50, seed=8)
    assert leaks_of(tmp_path, [line, "?", ""], [*train, line, ""]) == Leaks([0], [])
    assert leaks_of(tmp_path, [line, "?", ""], [*train, f"{line.lower()} !"]) == Leaks([], [0])
    assert leaks_of(tmp_path, [line, "?", ""], train) == Leaks([], [])


def test_a_text_that_was_tokenised_is_near_the_raw_one(tmp_path: Path):
    raw = "Two men, one of them tall, don't look at the camera."
    tokenised = "two men , one of them tall , don 't look at the camera ."
    assert leaks_of(tmp_path, [raw], [tokenised]) == Leaks([], [0])


def test_an_empty_training_text_holds_no_leak(tmp_path: Path):
    assert leaks_of(tmp_path, ["a line"], []) == Leaks([], [])
