"""5.1: sentence pairs batched by approximate length, an update holding about so many target pieces.

What an update consists of, and the order of updates, are a function of (corpus, seed, epoch) alone. How it is cut into
micro-batches depends on memory and changes nothing that is learnt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

POOL = 64  # updates whose pairs are sorted by length together
BUCKETS = 4  # stretches of like length that make up an update


def updates(
    src_pieces: NDArray[np.int32], tgt_pieces: NDArray[np.int32], update_pieces: int, seed: int, epoch: int
) -> Iterator[NDArray[np.int64]]:
    """The rows of each update of an epoch; every row comes once.

    The rows are shuffled and cut into pools; a pool is sorted by length and cut into buckets; the buckets are shuffled
    and each run of them is an update. So an update holds a few stretches of like length, and little padding.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(tgt_pieces))
    num_updates = num_updates_of_epoch(tgt_pieces, update_pieces)
    num_pools = -(-num_updates // POOL)
    shares = [num_updates * (i + 1) // num_pools - num_updates * i // num_pools for i in range(num_pools)]
    for pool, num in zip(cut_evenly(order, tgt_pieces, shares), shares, strict=True):
        pool = pool[np.lexsort((src_pieces[pool], tgt_pieces[pool]))]
        buckets = cut_evenly(pool, tgt_pieces, [1] * (num * BUCKETS))
        which = rng.permutation(len(buckets))
        for i in range(num):
            own = [buckets[int(b)] for b in which[i * BUCKETS : (i + 1) * BUCKETS]]
            rows: NDArray[np.int64] = np.concatenate(own)
            if len(rows):
                yield rows


def num_updates_of_epoch(tgt_pieces: NDArray[np.int32], update_pieces: int) -> int:
    """How many updates an epoch is cut into; the size asked for is met as nearly as that allows."""
    return max(1, round(int(tgt_pieces.sum(dtype=np.int64)) / update_pieces))


def cut_evenly(rows: NDArray[np.int64], pieces: NDArray[np.int32], shares: Sequence[int]) -> list[NDArray[np.int64]]:
    """Cut rows, in order, into parts whose pieces are as the shares."""
    upto: NDArray[np.int64] = np.cumsum(pieces[rows], dtype=np.int64)
    upto_shares: NDArray[np.float64] = np.cumsum(np.asarray(shares, np.float64))
    ends = upto_shares[:-1] * (upto[-1] / upto_shares[-1])
    cuts = cast("NDArray[np.int64]", np.searchsorted(upto, ends))
    return np.split(rows, cuts)


def micro_batches(
    rows: NDArray[np.int64], src_pieces: NDArray[np.int32], tgt_pieces: NDArray[np.int32], bound: int
) -> list[NDArray[np.int64]]:
    """Cut an update's rows, sorted by length, so that rows * (longest source + longest target) stays in the bound."""
    rows = rows[np.lexsort((rows, src_pieces[rows], tgt_pieces[rows]))][::-1]
    batches: list[NDArray[np.int64]] = []
    start, src, tgt = 0, 0, 0
    for i, row in enumerate(rows):
        src, tgt = max(src, int(src_pieces[row])), max(tgt, int(tgt_pieces[row]))
        if i > start and (i + 1 - start) * (src + tgt) > bound:
            batches.append(rows[start:i])
            start, src, tgt = i, int(src_pieces[row]), int(tgt_pieces[row])
    batches.append(rows[start:])
    return batches


def pad(sequences: Sequence[Sequence[int]], pad_id: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Sequences of pieces as (B, S), S a multiple, and their lengths (B,)."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    longest = -(-int(lengths.max()) // multiple) * multiple
    return torch.tensor([[*s, *[pad_id] * (longest - len(s))] for s in sequences]), lengths
