"""Test lines that stand in the training text: a score on them says what was remembered, not what was learnt.

A line stands there exactly if it is a line of the training text, but for white space around it. It stands there nearly
if at least half of the shingles of both are common to both (Jaccard; Broder 1997), here the sequences of eight bytes of
the text in small letters without spaces and ASCII punctuation: one word of ten may be another, and a tokenised text is
compared with a raw one. No near line is missed: it has so many shingles of a test line that some of the rarest of
these are among them (prefix filter, Chaudhuri et al. 2006); what has them is compared in full. Memory follows from the
test text; the training text is read once, some thousand lines at a time.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from diglot.corpus import PairFile
from diglot.progress import Advance
from diglot.subwords import clean

SIMILAR = 0.5  # of the shingles of two lines, the share that both have
NEEDED = 0.3  # share of what near lines have in common that is looked for first
SIZE = 8  # bytes of a shingle
LINES_AT_ONCE = 10_000
TABLE_BITS = 24  # of a first look at a shingle
PUNCTUATION = (string.punctuation + string.whitespace.replace("\n", "")).encode()
END = b"\n" + b"\0" * (SIZE - 1)  # after a line, so that none of its shingles reaches into the next

Shingles = NDArray[np.uint64]


@dataclass(frozen=True)
class Leaks:
    """The lines of a test text, from 0, that stand in the training text."""

    exact: list[int]
    near: list[int]  # and not exactly


def find_leaks(
    sides: Sequence[Sequence[str] | None], files: Sequence[PairFile], advance: Advance
) -> list[Leaks | None]:
    """What leaks of the sources and of the references (or of one of them: the other is None) of a test text."""
    blocks = read_blocks(files)
    first = next(blocks, (list[str](), list[str]()))
    searches = [Search(side, block) if side is not None else None for side, block in zip(sides, first, strict=True)]
    for block in itertools.chain([first], blocks):
        for search, lines in zip(searches, block, strict=True):
            if search:
                search.look_at(lines)
        advance(len(block[0]), "")
    return [search and search.leaks() for search in searches]


def read_blocks(files: Sequence[PairFile]) -> Iterator[tuple[list[str], list[str]]]:
    """The lines of both sides of a training text, some thousand at a time."""
    for file in files:
        file.check()
        for stretch in file.stretches(LINES_AT_ONCE):
            spans = list(file.spans(stretch))
            yield (
                [file.src.data[a:b].decode() for a, b, _, _ in spans],
                [file.tgt.data[c:d].decode() for _, _, c, d in spans],
            )
            file.src.release()
            file.tgt.release()


def shingles_of(lines: Sequence[str]) -> tuple[Shingles, NDArray[np.int64]]:
    """All shingles of some lines, in their order, and where each line's begin; one more entry is the end of all."""
    text = "\n".join(line.replace("\n", " ") for line in lines) + "\n"
    data = clean_block(text).encode().translate(None, PUNCTUATION + b"\0").replace(b"\n", END)
    codes = np.zeros(len(data), np.uint64)
    padded = np.frombuffer(data + b"\0" * SIZE, np.uint8)
    for i in range(SIZE):
        codes = codes << np.uint64(8) | padded[i : i + len(data)]
    # neither a line's end nor what fills up after it begins a shingle
    begins = padded[: len(data)] > ord("\n")
    ends = np.flatnonzero(padded[: len(data)] == ord("\n"))
    return codes[begins], np.concatenate(([0], np.cumsum(begins)[ends]))


def clean_block(text: str) -> str:
    """Many lines as the network sees them, in small letters."""
    return "\n".join(map(clean, text.casefold().split("\n")))


class Search:
    """The lines of one side of a test text, looked for in the same side of a training text, of which `sample` is some:
    it tells what is rare."""

    def __init__(self, lines: Sequence[str], sample: Sequence[str]):
        self.lines_of: dict[str, list[int]] = {}
        for i, line in enumerate(lines):
            if line := line.strip():
                self.lines_of.setdefault(line, []).append(i)
        self.exact, self.near = (np.zeros(len(lines), np.bool_) for _ in range(2))
        codes, starts = shingles_of(lines)
        self.own: list[Shingles] = [np.unique(codes[a:b]) for a, b in itertools.pairwise(starts)]
        sizes = np.array([len(codes) for codes in self.own], np.int64)
        shared = np.ceil(SIMILAR * sizes).astype(np.int64)  # by a near line, at least
        self.needed = np.maximum(1, (NEEDED * shared).astype(np.int64))
        self.known, self.first, self.lines = index_of(self.own, sizes - shared + self.needed, sample)
        self.table = np.zeros(1 << TABLE_BITS, np.bool_)
        self.table[self.places(self.known)] = True

    @staticmethod
    def places(codes: Shingles) -> NDArray[np.uint64]:
        """Where to look in the table: few shingles share a place (Fibonacci hashing)."""
        return (codes * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - TABLE_BITS)

    def look_at(self, lines: Sequence[str]) -> None:
        """Take note of the test lines that are among these, or near one of them."""
        for line in self.lines_of.keys() & {line.strip() for line in lines}:
            self.exact[self.lines_of[line]] = True
        codes, starts = shingles_of(lines)
        hits = np.flatnonzero(self.table[self.places(codes)])
        if not len(self.known):
            return
        at = np.minimum(np.searchsorted(self.known, codes[hits]), len(self.known) - 1)
        is_known = self.known[at] == codes[hits]
        hits, at = hits[is_known], at[is_known]
        trained = np.searchsorted(starts, hits, side="right") - 1
        # each hit with each test line that has the shingle among its rare ones
        counts = self.first[at + 1] - self.first[at]
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        tested = self.lines[np.repeat(self.first[at], counts) + offsets]
        trained = np.repeat(trained, counts)
        is_open = ~(self.exact | self.near)[tested]
        pairs, counts = np.unique(trained[is_open] * len(self.own) + tested[is_open], return_counts=True)
        is_enough = counts >= self.needed[pairs % len(self.own)]
        for pair in cast("list[int]", pairs[is_enough].tolist()):
            line, i = divmod(pair, len(self.own))
            own = self.own[i]
            if not self.near[i] and starts[line + 1] - starts[line] >= SIMILAR * len(own):
                other = np.unique(codes[starts[line] : starts[line + 1]])
                shared = len(np.intersect1d(own, other, assume_unique=True))
                self.near[i] = shared >= SIMILAR * (len(own) + len(other) - shared)

    def leaks(self) -> Leaks:
        """What was found."""
        return Leaks(np.flatnonzero(self.exact).tolist(), np.flatnonzero(self.near & ~self.exact).tolist())


def index_of(
    own: Sequence[Shingles], nums: NDArray[np.int64], sample: Sequence[str]
) -> tuple[Shingles, NDArray[np.int64], NDArray[np.int64]]:
    """So many shingles of each line that are rare in the sample, in order; where the lines begin that have each; those
    lines."""
    usual = np.sort(shingles_of(sample)[0])
    rare = [
        codes[np.argsort(np.searchsorted(usual, codes, "right") - np.searchsorted(usual, codes), kind="stable")[:num]]
        for codes, num in zip(own, nums.tolist(), strict=True)
    ]
    codes = np.concatenate([usual[:0], *rare])
    lines = np.repeat(np.arange(len(own)), [len(one) for one in rare])
    order = np.argsort(codes, kind="stable")
    known, first = np.unique(codes[order], return_index=True)
    return known, np.append(first, len(codes)), lines[order]
