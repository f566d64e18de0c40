"""5.1: sentence pairs batched by approximate length, an update holding about so many target pieces.

What an update consists of, and the order of updates, are a function of (corpus, seed, epoch) alone. How it is cut into
micro-batches depends on memory and changes nothing that is learnt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import cast

import numpy as np
from numpy.typing import NDArray

POOL = 64  # updates whose pairs are sorted by length together
LENGTHS, ROWS = 8, 16  # of whose multiples a micro-batch has its padded lengths and its rows
BUCKETS = 4  # stretches of like length that make up an update


def updates(
    src_pieces: NDArray[np.int32],
    tgt_pieces: NDArray[np.int32],
    update_pieces: int,
    seed: int,
    epoch: int,
    groups: Sequence[tuple[int, int, float]] = (),
) -> Iterator[NDArray[np.int64]]:
    """The rows of each update of an epoch; every row comes once, or as often as its group (from, to, times) says.

    The rows are shuffled and cut into pools; a pool is sorted by length and cut into buckets; the buckets are shuffled
    and each run of them is an update. So an update holds a few stretches of like length, and little padding.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(rows_of_epoch(groups or [(0, len(tgt_pieces), 1.0)], rng))
    num_updates = num_updates_of_epoch(tgt_pieces[order], update_pieces)
    num_pools = -(-num_updates // POOL)
    shares = [num_updates * (i + 1) // num_pools - num_updates * i // num_pools for i in range(num_pools)]
    for pool, num in zip(cut_evenly(order, tgt_pieces, shares), shares, strict=True):
        pool = pool[np.lexsort((src_pieces[pool], tgt_pieces[pool]))]
        buckets = cut_evenly(pool, tgt_pieces, [1] * (num * BUCKETS))
        which = rng.permutation(len(buckets))
        for i in range(num):
            own = [buckets[int(b)] for b in which[i * BUCKETS : (i + 1) * BUCKETS]]
            rows = np.concatenate(own).astype(np.int64)
            if len(rows):
                yield rows


def rows_of_epoch(groups: Sequence[tuple[int, int, float]], rng: np.random.Generator) -> NDArray[np.int32]:
    """The rows of each group, as often as it says; of a part of a group, random ones."""
    parts: list[NDArray[np.int32]] = []
    for start, end, times in groups:
        rows = np.arange(start, end, dtype=np.int32)
        parts += [rows] * int(times)
        if times % 1:
            parts.append(rng.permutation(rows)[: round(times % 1 * len(rows))])
    return np.concatenate(parts)


def num_updates_of_epoch(tgt_pieces: NDArray[np.int32], update_pieces: int) -> int:
    """How many updates an epoch is cut into; the size asked for is met as nearly as that allows."""
    return max(1, round(int(tgt_pieces.sum(dtype=np.int64)) / update_pieces))


def cut_evenly(rows: NDArray[np.int32], pieces: NDArray[np.int32], shares: Sequence[int]) -> list[NDArray[np.int32]]:
    """Cut rows, in order, into parts whose pieces are as the shares."""
    upto: NDArray[np.int64] = np.cumsum(pieces[rows], dtype=np.int64)
    upto_shares: NDArray[np.float64] = np.cumsum(np.asarray(shares, np.float64))
    ends = upto_shares[:-1] * (upto[-1] / upto_shares[-1])
    cuts = cast("NDArray[np.int64]", np.searchsorted(upto, ends))
    return np.split(rows, cuts)


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
