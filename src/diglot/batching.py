"""5.1: sentence pairs batched by approximate length, an update holding about so many target pieces.

What an update consists of, and the order of updates, are a function of (corpus, seed, epoch) alone, worked out as it is
read: no array is as long as the corpus. How an update is cut into micro-batches depends on memory and changes nothing
that is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import cast

import numpy as np
from numpy.typing import NDArray

POOL = 64  # updates whose pairs are sorted by length together
LENGTHS, ROWS = 8, 16  # of whose multiples a micro-batch has its padded lengths and its rows
BUCKETS = 4  # stretches of like length that make up an update
AT_ONCE = 1 << 14  # places of an epoch that are worked out together
ROUNDS = 8  # of the cipher that shuffles


Rows = NDArray[np.int64]
Pieces = NDArray[np.int32]
Groups = Sequence[tuple[int, int, float]]  # rows from, to, and how often they come in an epoch
Lengths = Callable[[Rows], tuple[Pieces, Pieces]]  # pieces of source and target of some rows


def updates(lengths: Lengths, groups: Groups, update_pieces: int, seed: int, epoch: int) -> Iterator[Rows]:
    """The rows of each update of an epoch; every row comes as often as its group says, of a part of a time random ones.

    The rows are shuffled and cut into pools; a pool is sorted by length and cut into buckets; the buckets are shuffled
    and each run of them is an update. So an update holds a few stretches of like length, and little padding.
    """
    total = pieces_of_epoch(lengths, groups, seed, epoch)
    num_updates = num_updates_of(total, update_pieces)
    num_pools = -(-num_updates // POOL)
    shares = [num_updates * (i + 1) // num_pools - num_updates * i // num_pools for i in range(num_pools)]
    rng = np.random.default_rng([seed, epoch])
    for num, (rows, src, tgt) in zip(shares, pools(lengths, groups, total, shares, seed, epoch), strict=True):
        by_length = np.lexsort((src, tgt))
        buckets = cut_evenly(rows[by_length], tgt[by_length], num * BUCKETS)
        which = rng.permutation(len(buckets))
        for i in range(num):
            update = np.concatenate([buckets[int(b)] for b in which[i * BUCKETS : (i + 1) * BUCKETS]])
            if len(update):
                yield update


def pools(
    lengths: Lengths, groups: Groups, total: int, shares: Sequence[int], seed: int, epoch: int
) -> Iterator[NDArray[np.int64]]:
    """The rows of an epoch in their order, cut so that their target pieces are as the shares: (row, source, target)."""
    num = rows_of_epoch(groups)
    places = (shuffled(places, num, seed, epoch) for places in stretches(num))
    order = (rows_at(own, groups, seed, epoch) for own in places)
    stretch = (np.array([rows, *lengths(rows)], np.int64) for rows in order)
    held, seen, is_all = np.empty((3, 0), np.int64), 0, False
    for upto in np.cumsum(shares):
        end = total * int(upto) / sum(shares) if upto < sum(shares) else math.inf
        while not is_all and seen + int(held[2].sum()) < end:
            more = next(stretch, None)
            held, is_all = (held, True) if more is None else (np.concatenate((held, more), axis=1), False)
        cut = int(np.searchsorted(seen + np.cumsum(held[2]), end))
        yield held[:, :cut]
        held, seen = held[:, cut:], seen + int(held[2, :cut].sum())


def rows_of_epoch(groups: Groups) -> int:
    """How many rows an epoch has, repeated ones counted again."""
    return sum(round((end - start) * times) for start, end, times in groups)


def rows_at(places: Rows, groups: Groups, seed: int, epoch: int) -> Rows:
    """The row at each place of an epoch before it is shuffled: group after group, a group as often as it comes."""
    rows, first = np.empty_like(places), 0
    for number, (start, end, times) in enumerate(groups):
        size, num = end - start, round((end - start) * times)
        own = (places >= first) & (places < first + num)
        which = (places[own] - first) % size
        rows[own] = start + (which if num % size == 0 else shuffled(which, size, seed, epoch, number + 1))
        first += num
    return rows


def pieces_of_epoch(lengths: Lengths, groups: Groups, seed: int, epoch: int) -> int:
    """The target pieces of all rows of an epoch."""
    places = stretches(rows_of_epoch(groups))
    return sum(int(lengths(rows_at(own, groups, seed, epoch))[1].sum(dtype=np.int64)) for own in places)


def num_updates_of(pieces: int, update_pieces: int) -> int:
    """How many updates so many target pieces are cut into; the size asked for is met as nearly as that allows."""
    return max(1, round(pieces / update_pieces))


def cut_evenly(rows: Rows, pieces: NDArray[np.int64], num: int) -> list[Rows]:
    """Cut rows, in order, into so many parts of like many pieces."""
    upto: NDArray[np.int64] = np.cumsum(pieces)
    ends: NDArray[np.float64] = np.arange(1, num) * (upto[-1] / num) if len(upto) else np.zeros(num - 1)
    return np.split(rows, cast("NDArray[np.int64]", np.searchsorted(upto, ends)))


# ------------------------------------------------------------------- random numbers that follow from what they are for


def stretches(num: int) -> Iterator[Rows]:
    """0, 1, 2 ... num - 1, so many at a time."""
    return (np.arange(start, min(num, start + AT_ONCE)) for start in range(0, num, AT_ONCE))


def shuffled(places: Rows, num: int, *key: int) -> Rows:
    """Which of `num` rows come at some places of the order that a key draws.

    A Feistel cipher over Z_a x Z_b (Black and Rogaway 2002): one half is moved by a hash of the other, in turns. That
    permutes a * b numbers, and so the rows, if what leads out of them is followed until it leads back. An order of any
    length is had without being held.
    """
    a = math.isqrt(max(0, num - 1)) + 1
    halves = np.array([a, -(-max(1, num) // a)], np.uint64)
    bases = np.random.SeedSequence((*key, ROUNDS)).generate_state(ROUNDS, np.uint64)

    def step(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = list(np.divmod(numbers, halves[1]))
        for i, base in enumerate(bases):
            half[i % 2] = (half[i % 2] + scrambled(base, half[1 - i % 2]) % halves[i % 2]) % halves[i % 2]
        return half[0] * halves[1] + half[1]

    found = step(places.astype(np.uint64))
    while (outside := found >= num).any():
        found[outside] = step(found[outside])
    return found.astype(np.int64)


def mix(seed: int, number: int, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits for each id."""
    base = np.random.SeedSequence((seed, number & 0xFFFFFFFFFFFFFFFF)).generate_state(1, np.uint64).astype(np.uint64)
    return scrambled(base, ids)


def scrambled(base: NDArray[np.uint64], ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64."""
    hashed = base + ids * np.uint64(0x9E3779B97F4A7C15)
    hashed = (hashed ^ hashed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    hashed = (hashed ^ hashed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return hashed ^ hashed >> np.uint64(31)


# ------------------------------------------------------------------- micro-batches


def micro_batches(
    rows: NDArray[np.int64], src_pieces: NDArray[np.int32], tgt_pieces: NDArray[np.int32], bound: int
) -> list[NDArray[np.int64]]:
    """Cut an update's rows, sorted by length, so that rows * (longest source + longest target) stays in the bound.

    Lengths and, where there are enough, rows come in multiples, so that few shapes recur: for a new shape the kernels
    of a product are made anew, which on a CPU takes longer than the product.
    """
    rows = rows[np.lexsort((rows, src_pieces[rows], tgt_pieces[rows]))][::-1]
    batches: list[NDArray[np.int64]] = []
    start, src, tgt = 0, 0, 0
    for i, row in enumerate(rows):
        src, tgt = max(src, int(src_pieces[row])), max(tgt, int(tgt_pieces[row]))
        most = bound // (round_up(src, LENGTHS) + round_up(tgt, LENGTHS))
        if i > start and i + 1 - start > (most if most < ROWS else most // ROWS * ROWS):
            batches.append(rows[start:i])
            start, src, tgt = i, int(src_pieces[row]), int(tgt_pieces[row])
    batches.append(rows[start:])
    return batches


def round_up(number: int, multiple: int) -> int:
    """To a multiple."""
    return -(-number // multiple) * multiple


def pad(
    sequences: Sequence[Sequence[int]], pad_id: int, multiple: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sequences of pieces as (B, S), S a multiple, and their lengths (B,)."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    longest = round_up(int(lengths.max()), multiple)
    padded = np.full((len(sequences), longest), pad_id, np.int64)
    padded[np.arange(longest) < lengths[:, None]] = np.fromiter(chain.from_iterable(sequences), np.int64)
    return padded, lengths
