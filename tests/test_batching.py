"""Batches: every pair once, in an order that follows from seed and epoch alone, with little padding."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diglot.batching import (
    AT_ONCE,
    BUCKETS,
    LENGTHS,
    POOL,
    ROWS,
    Groups,
    Lengths,
    Pieces,
    Rows,
    micro_batches,
    num_updates_of,
    pad,
    pieces_of_epoch,
    round_up,
    rows_of_epoch,
    shuffled,
    stretches,
    updates,
)


def corpus_of(num: int, longest: int, seed: int = 0) -> tuple[Pieces, Pieces]:
    """Lengths of so many pairs, as sentences have them: most are short, and both sides are alike."""
    rng = np.random.default_rng(seed)
    src = np.minimum(2 + rng.geometric(1.5 / longest, num), longest)
    tgt = np.clip(src + rng.integers(-3, 4, num), 2, longest)
    return src.astype(np.int32), tgt.astype(np.int32)


corpora = st.builds(corpus_of, st.integers(1, 400), st.integers(3, 60), st.integers(0, 9))
sizes = st.integers(1, 2000)


def epoch_of(
    corpus: tuple[Pieces, Pieces], update_pieces: int, seed: int = 1, epoch: int = 0, groups: Groups = ()
) -> list[Rows]:
    return list(updates(lengths_in(corpus), groups or [(0, len(corpus[0]), 1.0)], update_pieces, seed, epoch))


def lengths_in(corpus: tuple[Pieces, Pieces]) -> Lengths:
    return lambda rows: (corpus[0][rows], corpus[1][rows])


def as_lists(batches: list[Rows]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def padded(rows: Rows, src: Pieces, tgt: Pieces) -> int:
    return len(rows) * (int(src[rows].max()) + int(tgt[rows].max()))


# ------------------------------------------------------------------- updates


@given(corpora, sizes, st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_holds_every_row_once(
    corpus: tuple[Pieces, Pieces], update_pieces: int, seed: int, epoch: int
) -> None:
    batches = epoch_of(corpus, update_pieces, seed, epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(corpus[0])))
    assert all(len(batch) for batch in batches)
    assert len(batches) <= num_updates_of(int(corpus[1].sum()), update_pieces)


@given(corpora, sizes)
def test_an_update_holds_about_as_many_target_pieces_as_asked_for(
    corpus: tuple[Pieces, Pieces], update_pieces: int
) -> None:
    _, tgt = corpus
    batches = epoch_of(corpus, update_pieces)
    num, longest = num_updates_of(int(tgt.sum()), update_pieces), int(tgt.max())
    share = int(tgt.sum()) / num
    assert abs(share - update_pieces) <= update_pieces / (2 * num) * 1.000001 or num == 1
    if len(batches) == num:  # else an update is smaller than a pair, and some hold none
        # each of its buckets is cut within a pair of where it should be, and so is the pool
        assert all(abs(int(tgt[batch].sum()) - share) <= (BUCKETS + 1) * longest for batch in batches)


def test_the_updates_of_a_large_corpus_are_alike_in_size() -> None:
    src, tgt = corpus_of(60_000, 60)
    batches = epoch_of((src, tgt), 4096)
    assert len(batches) > 2 * POOL
    assert all(abs(int(tgt[batch].sum()) - 4096) <= 4096 / 20 for batch in batches)


@given(corpora, sizes, st.integers(0, 3), st.integers(0, 3))
def test_the_order_follows_from_seed_and_epoch_alone(
    corpus: tuple[Pieces, Pieces], update_pieces: int, seed: int, epoch: int
) -> None:
    one = as_lists(epoch_of(corpus, update_pieces, seed, epoch))
    np.random.seed(seed + 1)
    torch.manual_seed(seed + 1)
    assert as_lists(epoch_of(corpus, update_pieces, seed, epoch)) == one


def test_epochs_and_seeds_differ() -> None:
    corpus = corpus_of(500, 40)
    orders = {str(as_lists(epoch_of(corpus, 500, seed, epoch))) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_an_epoch_can_be_taken_up_in_its_middle() -> None:
    corpus = corpus_of(500, 40)
    rest = updates(lengths_in(corpus), [(0, 500, 1.0)], 300, 1, 2)
    for _ in range(5):
        next(rest)
    assert as_lists(list(rest)) == as_lists(epoch_of(corpus, 300, 1, 2))[5:]


@pytest.mark.parametrize("update_pieces", [1, 7, 25_000])
def test_a_corpus_of_one_pair_is_one_update(update_pieces: int) -> None:
    corpus = np.array([5], np.int32), np.array([7], np.int32)
    assert as_lists(epoch_of(corpus, update_pieces)) == [[0]]


def test_a_corpus_smaller_than_an_update_is_one_update() -> None:
    corpus = corpus_of(50, 20)
    (batch,) = epoch_of(corpus, 25_000)
    assert sorted(batch.tolist()) == list(range(50))


def test_the_number_of_pieces_of_a_large_corpus_does_not_overflow() -> None:
    groups = [(0, 20_000_000, 1.0)]  # 5.12e9 pieces, more than 32 bits hold
    pieces = pieces_of_epoch(lambda rows: (np.full(len(rows), 256, np.int32),) * 2, groups, 1, 0)
    assert num_updates_of(pieces, 25_000) == 204_800


# ------------------------------------------------------------------- the shuffle


def order_of(num: int, *key: int) -> list[int]:
    return np.concatenate([shuffled(places, num, *key) for places in stretches(num)] or [np.arange(0)]).tolist()


@given(st.integers(0, 3 * AT_ONCE), st.integers(0, 2**40), st.integers(0, 9))
def test_a_shuffle_holds_every_row_once(num: int, seed: int, epoch: int) -> None:
    assert sorted(order_of(num, seed, epoch)) == list(range(num))


def test_every_order_of_few_rows_is_drawn_as_often() -> None:
    counts = Counter(str(order_of(4, seed)) for seed in range(4800))
    assert len(counts) == 24
    chi_squared = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_squared < 50  # of 23 degrees of freedom: once in a thousand times


def test_a_shuffle_leaves_no_trace_of_the_order_before() -> None:
    num = 200_000
    order = np.array(order_of(num, 1, 2))
    # where a row goes says nothing of where it was, of its neighbour's place, or of that in another epoch
    for one, two in (
        (np.arange(num), order), (order[1:], order[:-1]), (order, np.array(order_of(num, 1, 3))),
    ):  # fmt: skip
        table = np.zeros((20, 20))
        np.add.at(table, (one * 20 // num, two * 20 // num), 1)
        chi_squared = ((table - len(one) / 400) ** 2 / (len(one) / 400)).sum()
        assert abs(chi_squared - 361) < 4 * (2 * 361) ** 0.5
    assert (order == np.arange(num)).sum() < 10  # one stays where it was, on average
    assert (np.abs(np.diff(order)) == 1).sum() < 12  # two neighbours stay together


# ------------------------------------------------------------------- several corpora


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 5)), min_size=1, max_size=4), st.integers(0, 5))
def test_the_rows_of_a_group_come_as_often_as_it_says(sizes: list[tuple[int, float]], epoch: int) -> None:
    ends = np.cumsum([size for size, _ in sizes]).tolist()
    groups = [(end - size, end, times) for end, (size, times) in zip(ends, sizes, strict=True)]
    corpus = corpus_of(ends[-1], 20)
    if not rows_of_epoch(groups):
        return
    counts = np.bincount(np.concatenate(epoch_of(corpus, 100, 1, epoch, groups)), minlength=ends[-1])
    for start, end, times in groups:
        assert counts[start:end].sum() == round(times * (end - start))
        assert set(counts[start:end].tolist()) <= {int(times), int(times) + 1}  # each row about as often


def test_every_epoch_takes_other_rows_of_a_group_that_comes_in_part() -> None:
    corpus = corpus_of(200, 20)
    parts = {str(sorted(np.concatenate(epoch_of(corpus, 100, 1, epoch, [(0, 200, 0.5)])))) for epoch in range(5)}
    assert len(parts) == 5


# ------------------------------------------------------------------- micro-batches


@given(corpora, st.integers(1, 3000), st.randoms(use_true_random=False))
def test_micro_batches_are_the_updates_rows_in_any_order_of_them(
    corpus: tuple[Pieces, Pieces], bound: int, random: object
) -> None:
    rows = np.arange(len(corpus[0]), dtype=np.int64)
    batches = micro_batches(rows, *corpus, bound)
    assert sorted(np.concatenate(batches).tolist()) == rows.tolist()
    shuffled = rows.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert as_lists(micro_batches(shuffled, *corpus, bound)) == as_lists(batches)


@given(corpora, st.integers(1, 3000))
def test_a_micro_batch_stays_in_the_bound_unless_it_is_one_pair(corpus: tuple[Pieces, Pieces], bound: int) -> None:
    rows = np.arange(len(corpus[0]), dtype=np.int64)
    batches = micro_batches(rows, *corpus, bound)
    assert all(padded(batch, *corpus) <= bound or len(batch) == 1 for batch in batches)
    for one, two in pairwise(batches):  # and none is smaller than whole multiples of lengths and rows make it
        more = np.append(one, two[0])
        num_rows = round_up(len(more), ROWS) if len(more) > ROWS else len(more)
        assert num_rows * sum(round_up(int(side[more].max()), LENGTHS) for side in corpus) > bound


def test_the_bound_changes_no_update() -> None:
    src, tgt = corpus_of(800, 40)
    for rows in epoch_of((src, tgt), 2000):
        parts = [np.concatenate(micro_batches(rows, src, tgt, bound)) for bound in (1, 100, 1000, 10**9)]
        assert all(sorted(part.tolist()) == sorted(rows.tolist()) for part in parts)
        assert len(micro_batches(rows, src, tgt, 10**9)) == 1


def test_little_is_padding() -> None:
    src, tgt = corpus_of(20_000, 60)
    used = int(src.sum() + tgt.sum())

    def share_of_padding(batches: list[Rows]) -> float:
        return 1 - used / sum(
            padded(micro, src, tgt) for rows in batches for micro in micro_batches(rows, src, tgt, 4096)
        )

    order = np.random.default_rng(1).permutation(len(src))
    at_random = [part for rows in np.array_split(order, 100) for part in np.array_split(rows, 8)]
    random_share = 1 - used / sum(padded(part, src, tgt) for part in at_random)
    ours = share_of_padding(epoch_of((src, tgt), 4096))
    assert ours < 0.2
    assert ours < random_share / 2.5


# ------------------------------------------------------------------- padding


@given(st.lists(st.lists(st.integers(1, 99), max_size=20), min_size=1, max_size=8), st.sampled_from([1, 2, 8, 16]))
def test_padding_fills_up_to_a_multiple_and_nothing_else(sequences: list[list[int]], multiple: int) -> None:
    padded_ids, lengths = pad(sequences, 0, multiple)
    longest = max(map(len, sequences))
    assert lengths.tolist() == [len(sequence) for sequence in sequences]
    assert padded_ids.shape[0] == len(sequences)
    assert longest <= padded_ids.shape[1] < longest + multiple
    assert padded_ids.shape[1] % multiple == 0
    for row, sequence in zip(padded_ids.tolist(), sequences, strict=True):
        assert row[: len(sequence)] == sequence
        assert not any(row[len(sequence) :])


def test_padding_is_of_whole_numbers_whatever_the_lengths() -> None:
    for sequences in ([[3]], [[3], []], [[3, 4], [5]]):
        ids, lengths = pad(sequences, 9)
        assert ids.dtype == lengths.dtype == np.int64
        assert (ids == 9).sum() == ids.size - sum(map(len, sequences))
