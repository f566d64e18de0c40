"""The "models" here are tables: a tree for each source, with the log-probabilities of the next piece at each node."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diglot.search import Hypothesis, beam_search, ensemble, greedy_search, length_penalty, sampling_search

EOS, A, B = 0, 1, 2


def random_trees(num_sources, num_pieces, depth, seed, eos_logit=0.0):
    """(sources, nodes, V): the children of node n are n * V + 1, ..., n * V + V."""
    nodes = sum(num_pieces**level for level in range(depth))
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_sources, nodes, num_pieces, generator=generator)
    logits[:, :, EOS] += eos_logit
    return logits.log_softmax(-1)


def written_tree(num_pieces, depth, rows):
    """One source's tree from {pieces so far: probabilities}; whatever is not written ends."""
    table = torch.zeros(1, sum(num_pieces**level for level in range(depth)), num_pieces)
    table[:, :, EOS] = 1
    for history, probabilities in rows.items():
        table[0, node_of(history, num_pieces)] = torch.tensor(probabilities)
    return table.log()


def node_of(history, num_pieces):
    node = 0
    for piece in history:
        node = node * num_pieces + 1 + piece
    return node


def stepper(trees):
    """A step function that knows a row's history from `last` and `parents` alone."""
    V = trees.size(-1)
    sources, nodes = torch.arange(len(trees)), torch.zeros(len(trees), dtype=torch.long)

    def step(last, parents):
        nonlocal sources, nodes
        sources, nodes = sources[parents], nodes[parents]
        if last is not None:
            nodes = nodes * V + 1 + last
        return trees[sources, nodes]

    return step


def log_prob_of(tree, pieces):
    """Of pieces and their end, by walking the tree."""
    V = tree.size(-1)
    path = (*pieces, EOS)
    return sum(tree[node_of(path[:i], V), piece].item() for i, piece in enumerate(path))


def check(found, trees, bounds, alpha):
    """What holds of every search: bounds, order, and scores that the tables confirm."""
    for hypotheses, tree, bound in zip(found, trees, bounds, strict=True):
        assert hypotheses
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
        for h in hypotheses:
            assert EOS not in h.pieces
            assert len(h.pieces) + 1 <= bound
            assert h.hit_bound == (len(h.pieces) + 1 == bound)
            assert h.log_prob == pytest.approx(log_prob_of(tree, h.pieces), abs=1e-4)
            assert h.score == pytest.approx(h.log_prob / ((5 + len(h.pieces) + 1) / 6) ** alpha)


def pieces_of(hypotheses):
    return [h.pieces for h in hypotheses]


# ------------------------------------------------------------------- By hand


def test_greedy_and_beam_search_by_hand():
    #  first piece   after A      after B
    #  end .1        end .4       end .9     Greedy takes A (.5), then the end (.4): .5 * .4 = .20.
    #  A   .5        A   .35      A   .06    A beam of 2 keeps A (.5) and B (.4). Then B-end .4 * .9 = .36,
    #  B   .4        B   .25      B   .04    A-end .20, AA .175, AB .125: the two best both end.
    rows = {(): [0.1, 0.5, 0.4], (A,): [0.4, 0.35, 0.25], (B,): [0.9, 0.06, 0.04]}
    tree = written_tree(3, 4, rows)
    (greedy,) = greedy_search(stepper(tree), [4], EOS, alpha=0.0)[0]
    assert greedy.pieces == (A,)
    assert math.exp(greedy.log_prob) == pytest.approx(0.20)
    best, second = beam_search(stepper(tree), [4], EOS, beam_size=2, alpha=0.0, num_best=2)[0]
    assert (best.pieces, second.pieces) == ((B,), (A,))
    assert math.exp(best.score) == pytest.approx(0.36)
    assert math.exp(second.score) == pytest.approx(0.20)
    assert (best.hit_bound, second.hit_bound) == (False, False)


def test_a_beam_of_two_loses_what_it_cannot_keep():
    # The end at once has .3, below A .36 and B .34, so a beam of 2 does not let it end; a beam of 3 does.
    # Then every way on is split in three, at most .36 * .4 = .144 and .34 * .4 = .136.
    rows = {(): [0.3, 0.36, 0.34], (A,): [0.4, 0.3, 0.3], (B,): [0.4, 0.35, 0.25]}
    tree = written_tree(3, 4, rows)
    assert pieces_of(beam_search(stepper(tree), [4], EOS, beam_size=2, alpha=0.0)[0]) == [(A,)]
    assert pieces_of(beam_search(stepper(tree), [4], EOS, beam_size=3, alpha=0.0)[0]) == [()]


def test_alpha_decides_between_short_and_long():
    # A-end: .7 * .6 = .42, two pieces with the end. BBBB-end: .3, five pieces with the end.
    # alpha 0: log .42 > log .3. alpha 1: log .42 / (7/6) = -.744 < log .3 / (10/6) = -.722.
    rows = {(): [0, 0.7, 0.3], (A,): [0.6, 0.4, 0], (B,): [0, 0, 1], (B, B): [0, 0, 1], (B, B, B): [0, 0, 1]}
    tree = written_tree(3, 6, rows)
    (short,) = beam_search(stepper(tree), [6], EOS, alpha=0.0)[0]
    assert (short.pieces, short.score) == ((A,), pytest.approx(math.log(0.42)))
    (long,) = beam_search(stepper(tree), [6], EOS, alpha=1.0)[0]
    assert (long.pieces, long.score) == ((B, B, B, B), pytest.approx(math.log(0.3) * 6 / 10))


def test_the_search_ends_when_as_many_have_ended_as_the_beam_is_wide():
    # As above, but AA ends with .6. A-end .42 is found first. Then the two best are BBB .3 and AA-end .28 * .6 = .168:
    # a beam of 2 has found its two and does not wait for BBBB-end, which a beam of 3 does.
    rows = {(): [0, 0.7, 0.3], (A,): [0.6, 0.4, 0], (B,): [0, 0, 1], (B, B): [0, 0, 1], (B, B, B): [0, 0, 1]}
    tree = written_tree(3, 6, rows | {(A, A): [0.6, 0.4, 0], (A, A, A): [0, 1, 0]})
    found = beam_search(stepper(tree), [6], EOS, beam_size=2, alpha=1.0, num_best=2)[0]
    assert pieces_of(found) == [(A,), (A, A)]
    assert pieces_of(beam_search(stepper(tree), [6], EOS, beam_size=3, alpha=1.0)[0]) == [(B, B, B, B)]


def test_length_penalty_by_hand():
    assert length_penalty(1, 0.6) == 1
    assert length_penalty(7, 1.0) == 2
    assert length_penalty(19, 0.5) == 2
    assert length_penalty(30, 0.0) == 1


# ------------------------------------------------------------------- Properties


@given(
    num_pieces=st.integers(2, 6),
    bounds=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    alpha=st.sampled_from([0.0, 0.6, 2.0]),
    seed=st.integers(0, 2**32),
)
def test_a_beam_of_one_is_greedy(num_pieces, bounds, alpha, seed):
    trees = random_trees(len(bounds), num_pieces, 5, seed)
    greedy = greedy_search(stepper(trees), bounds, EOS, alpha=alpha)
    check(greedy, trees, bounds, alpha)
    beam = beam_search(stepper(trees), bounds, EOS, beam_size=1, alpha=alpha)
    assert [pieces_of(found) for found in beam] == [pieces_of(found) for found in greedy]
    check(beam, trees, bounds, alpha)


def exhaustive(tree, bound, alpha, num_best):
    """The best of all sequences there are."""
    others = [piece for piece in range(tree.size(-1)) if piece != EOS]
    every = [pieces for length in range(bound) for pieces in product(others, repeat=length)]
    scored = [(log_prob_of(tree, pieces) / ((6 + len(pieces)) / 6) ** alpha, pieces) for pieces in every]
    return sorted(scored, reverse=True)[:num_best]


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("num_pieces", [2, 3, 4])
@pytest.mark.parametrize("num_best", [1, 2, 5])
def test_a_wide_beam_finds_what_exhaustive_search_finds(num_pieces, alpha, num_best):
    bounds = [5, 4, 2, 1, 5]
    trees = random_trees(len(bounds), num_pieces, 5, seed=num_pieces)
    found = beam_search(stepper(trees), bounds, EOS, beam_size=200, alpha=alpha, num_best=num_best)
    check(found, trees, bounds, alpha)
    for hypotheses, tree, bound in zip(found, trees, bounds, strict=True):
        expected = exhaustive(tree, bound, alpha, num_best)
        assert pieces_of(hypotheses) == [pieces for _, pieces in expected]
        assert [h.score for h in hypotheses] == pytest.approx([score for score, _ in expected], abs=1e-4)


@pytest.mark.parametrize("beam_size", [2, 3, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_the_best_of_a_beam_are_sorted_distinct_and_scored_by_the_table(beam_size, alpha):
    bounds = [5, 3, 4, 5]
    trees = random_trees(len(bounds), 5, 5, seed=beam_size)
    found = beam_search(stepper(trees), bounds, EOS, beam_size=beam_size, alpha=alpha, num_best=beam_size)
    check(found, trees, bounds, alpha)
    for hypotheses in found:
        assert len(hypotheses) == len(set(pieces_of(hypotheses))) == beam_size
    best = beam_search(stepper(trees), bounds, EOS, beam_size=beam_size, alpha=alpha)
    for one, several in zip(best, found, strict=True):
        assert one[0].score >= several[0].score  # the search for more may end no later


SEARCHES = {
    "greedy": lambda step, bounds, seeds, prefixes: greedy_search(step, bounds, EOS, prefixes=prefixes),
    "beam": lambda step, bounds, seeds, prefixes: beam_search(
        step, bounds, EOS, beam_size=3, num_best=3, prefixes=prefixes
    ),
    "sampling": lambda step, bounds, seeds, prefixes: sampling_search(
        step, bounds, EOS, seeds=seeds, num_best=3, prefixes=prefixes
    ),
}


@pytest.mark.parametrize("method", SEARCHES)
def test_a_source_does_not_see_its_neighbours(method):
    search = SEARCHES[method]
    bounds, prefixes = [2, 5, 1, 3, 5], [[], [2], [], [1, 1], []]
    seeds = [7, 8, 9, 7, 11]
    trees = random_trees(len(bounds), 4, 5, seed=3)
    together = search(stepper(trees), bounds, seeds, prefixes)
    check(together, trees, bounds, 0.6)
    for i, found in enumerate(together):
        assert search(stepper(trees[i : i + 1]), bounds[i : i + 1], seeds[i : i + 1], prefixes[i : i + 1]) == [found]
    order = [3, 0, 4, 1, 2]
    shuffled = search(stepper(trees[order]), *([values[i] for i in order] for values in (bounds, seeds, prefixes)))
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize("method", SEARCHES)
def test_a_bound_on_the_length_forces_the_end(method):
    trees = random_trees(4, 4, 5, seed=1, eos_logit=-20.0)
    bounds = [1, 2, 5, 3]
    found = SEARCHES[method](stepper(trees), bounds, [1, 2, 3, 4], None)
    check(found, trees, bounds, 0.6)  # the end counts in the score with all of its improbability
    assert all(h.hit_bound and h.log_prob < -10 for hypotheses in found for h in hypotheses)
    assert [{len(h.pieces) + 1 for h in hypotheses} for hypotheses in found] == [{bound} for bound in bounds]


@pytest.mark.parametrize("method", SEARCHES)
def test_a_prefix_is_forced(method):
    prefixes, bounds = [[1, 2], [], [3], [2, 2, 2, 2, 2]], [5, 5, 5, 3]
    trees = random_trees(4, 4, 5, seed=5)
    found = SEARCHES[method](stepper(trees), bounds, [1, 2, 3, 4], prefixes)
    check(found, trees, bounds, 0.6)
    for hypotheses, prefix, bound in zip(found, prefixes, bounds, strict=True):
        assert all(h.pieces[: len(prefix)] == tuple(prefix[: bound - 1]) for h in hypotheses)
    free = SEARCHES[method](stepper(trees), bounds, [1, 2, 3, 4], None)
    assert found[1] == free[1]


def test_a_wide_beam_with_a_prefix_finds_the_best_that_begin_with_it():
    (tree,) = trees = random_trees(1, 4, 5, seed=6)
    (found,) = beam_search(stepper(trees), [5], EOS, beam_size=200, num_best=5, prefixes=[[3, 1]])
    every = [pieces for _, pieces in exhaustive(tree, 5, 0.6, 10_000) if pieces[:2] == (3, 1)]
    assert pieces_of(found) == every[:5]


@pytest.mark.parametrize("method", SEARCHES)
def test_steps_follow_the_rows_that_remain(method):
    """`last` and `parents` alone tell each row's history, and every hypothesis is a row's history that ended."""
    trees = random_trees(3, 4, 5, seed=8)
    step = stepper(trees)
    histories, seen = [(source,) for source in range(3)], set()

    def following(last, parents):
        nonlocal histories
        assert parents.dtype == torch.long
        assert (last is None) == (not seen)
        new = [[]] * len(parents) if last is None else last[:, None].tolist()
        histories = [(*histories[parent], *piece) for parent, piece in zip(parents.tolist(), new, strict=True)]
        seen.update(histories)
        return step(last, parents)

    found = SEARCHES[method](following, [5, 4, 5], [1, 2, 3], None)
    for source, hypotheses in enumerate(found):
        assert all((source, *h.pieces) in seen for h in hypotheses)


def test_no_source_no_result():
    assert beam_search(stepper(random_trees(1, 3, 2, 1)), [], EOS) == []
    assert greedy_search(stepper(random_trees(1, 3, 2, 1)), [], EOS) == []
    assert sampling_search(stepper(random_trees(1, 3, 2, 1)), [], EOS, seeds=[]) == []


def test_the_tables_of_a_model_are_not_written_to():
    trees = random_trees(2, 4, 5, seed=1)
    before = trees.clone()
    for search in SEARCHES.values():
        search(lambda last, parents: trees[0, : len(parents)], [3, 4], [1, 2], [[1], []])
    assert torch.equal(trees, before)


# ------------------------------------------------------------------- Sampling


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.10, 0.50, 0.25, 0.15]),
        ({"temperature": 2.0}, [0.10**0.5, 0.50**0.5, 0.25**0.5, 0.15**0.5]),
        ({"temperature": 0.5}, [0.10**2, 0.50**2, 0.25**2, 0.15**2]),
        ({"top_k": 2}, [0, 0.50, 0.25, 0]),
        ({"top_k": 9}, [0.10, 0.50, 0.25, 0.15]),
        ({"top_p": 0.6}, [0, 0.50, 0.25, 0]),  # the fewest pieces that hold at least .6
        ({"top_p": 0.8}, [0, 0.50, 0.25, 0.15]),
        ({"top_k": 3, "top_p": 0.8}, [0, 0.50, 0.25, 0]),  # .75 of the .9 that the three hold
    ],
)
def test_samples_are_distributed_as_the_probabilities(options, expected):
    tree = torch.tensor([[[0.10, 0.50, 0.25, 0.15]]]).expand(1, 5, 4).log()
    num = 4000
    (found,) = sampling_search(stepper(tree), [2], EOS, seeds=[1], num_best=num, **options)
    counts = torch.zeros(4)
    for h in found:  # the end at once, or a piece and then the end because of the bound
        counts[h.pieces[0] if h.pieces else EOS] += 1
    wanted = torch.tensor(expected) / sum(expected) * num
    assert (counts[wanted == 0] == 0).all()
    chi_square = ((counts - wanted) ** 2 / wanted)[wanted > 0].sum()
    assert chi_square < 16.3  # one fair draw in a thousand exceeds it with 3 degrees of freedom


def test_samples_of_sequences_are_distributed_as_the_model():
    (tree,) = trees = random_trees(1, 3, 3, seed=4)
    num = 4000
    (found,) = sampling_search(stepper(trees), [3], EOS, seeds=[5], num_best=num)
    every = [pieces for length in range(3) for pieces in product((A, B), repeat=length)]
    chi_square = 0.0
    for pieces in every:
        # at the bound of 3 the end is forced, so what precedes it decides
        log_prob = log_prob_of(tree, pieces)
        if len(pieces) == 2:
            log_prob -= tree[node_of(pieces, 3), EOS].item()
        wanted = num * math.exp(log_prob)
        chi_square += (pieces_of(found).count(pieces) - wanted) ** 2 / wanted
    assert chi_square < 22.5  # one in a thousand, 6 degrees of freedom
    check([found], trees, [3], 0.6)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-3}])
def test_sampling_of_the_most_probable_alone_is_greedy(options):
    trees = random_trees(6, 5, 5, seed=2)
    greedy = greedy_search(stepper(trees), [5] * 6, EOS)
    assert sampling_search(stepper(trees), [5] * 6, EOS, seeds=range(6), **options) == greedy


def test_samples_follow_from_their_seed_alone():
    trees = torch.zeros(3, 781, 5).log_softmax(-1)  # every piece is as probable as any
    first, second, third = sampling_search(stepper(trees), [5] * 3, EOS, seeds=[1, 2, 1], num_best=4)
    assert first == third
    assert first != second
    assert len(set(pieces_of(first))) > 1  # several samples of one source are not the same one


# ------------------------------------------------------------------- Ensembles


@pytest.mark.parametrize("method", SEARCHES)
def test_an_ensemble_is_the_mean_of_probabilities(method):
    several = [random_trees(2, 4, 5, seed) for seed in (1, 2, 3)]
    mean = torch.stack([trees.exp() for trees in several]).mean(0).log()
    bounds, search = [5, 4], SEARCHES[method]
    found = search(ensemble([stepper(trees) for trees in several]), bounds, [1, 2], None)
    check(found, mean, bounds, 0.6)
    assert list(map(pieces_of, found)) == list(map(pieces_of, search(stepper(mean), bounds, [1, 2], None)))


def test_a_piece_that_no_model_allows_is_none_of_the_ensembles():
    tree = written_tree(3, 3, {(): [0, 0.4, 0.6], (A,): [0.5, 0, 0.5], (B,): [0.3, 0, 0.7]})
    (found,) = beam_search(ensemble([stepper(tree), stepper(tree)]), [3], EOS, alpha=0.0)
    assert found == [Hypothesis((B, B), pytest.approx(math.log(0.42)), pytest.approx(math.log(0.42)), True)]
