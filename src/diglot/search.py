"""6.1: from probabilities to sequences, by greedy search, beam search or sampling.

Axes:  A active sources, W hypotheses of each, R = A * W rows, V pieces.
The search never sees a model. It calls `step(last, parents)`: row i of this call goes on from row parents[i] of the
call before (of the sources, at the first call) with the piece last[i] (`last` is None at the first call: there is no
piece yet); the answer is the log-probabilities (R, V) of each row's next piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

Step = Callable[[Tensor | None, Tensor], Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """A target sequence that was found."""

    pieces: tuple[int, ...]  # without the end piece, which log_prob and score count
    log_prob: float  # log P(pieces and end | source)
    score: float  # log_prob / length_penalty(len(pieces) + 1, alpha)
    hit_bound: bool = False  # it was ended by the bound on its length


def length_penalty(num_pieces: int, alpha: float) -> float:
    """Lp(Y) = ((5 + |Y|) / (5 + 1))^alpha, where |Y| counts the end piece (Wu et al. 2016, equation 14)."""
    return ((5 + num_pieces) / 6) ** alpha


def beam_search(
    step: Step,
    max_lengths: Sequence[int],
    eos_id: int,
    *,
    beam_size: int = 4,
    alpha: float = 0.6,
    num_best: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
    unwritable: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """The `num_best` hypotheses of each source, best first.

    A hypothesis has at most max_lengths[i] pieces with its end, begins with prefixes[i], and has none of the
    `unwritable` pieces after that. The search of a source
    ends when `beam_size` hypotheses have ended or when no open one can still beat the ones to be returned.

    >>> def step(last, parents):  # a "model" whose next piece depends on the last alone
    ...     table = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4], [0.9, 0.05, 0.05]]).log()
    ...     return table[last] if last is not None else table[:1].expand(len(parents), -1)
    >>> [hypothesis.pieces for hypothesis in beam_search(step, [4], eos_id=0, num_best=2, alpha=0.0)[0]]
    [(1,), (2,)]
    """
    found: list[list[Hypothesis]] = [[] for _ in max_lengths]
    sources = list(range(len(max_lengths)))  # the active ones
    total = torch.zeros(len(max_lengths), 1)  # (A, W) log-probability of each open hypothesis
    history = torch.zeros(len(max_lengths), 1, 0, dtype=torch.long)  # (A, W, pieces so far)
    parents, last, length = torch.arange(len(max_lengths)), None, 0
    while sources:
        length += 1
        log_probs = step(last, parents).view(*total.shape, -1)  # (A, W, V)
        device, V = log_probs.device, log_probs.size(-1)
        forced = forced_pieces(sources, max_lengths, length, prefixes, eos_id)
        log_probs = constrain(log_probs, forced, unwritable)
        candidates = (total.to(device)[:, :, None] + log_probs).flatten(1)  # (A, W * V)
        top, index = candidates.topk(min(2 * beam_size, candidates.size(1)))  # enough if all the best ones end
        top, index = top.cpu(), index.cpu()
        row, piece = index // V, index % V
        ends = piece == eos_id

        for a, k in cast("list[list[int]]", (ends & (top > -math.inf))[:, :beam_size].nonzero().tolist()):
            log_prob, pieces = top[a, k].item(), cast("list[int]", history[a, row[a, k]].tolist())
            score = log_prob / length_penalty(length, alpha)
            hit_bound = length == max_lengths[sources[a]]
            found[sources[a]].append(Hypothesis(tuple(pieces), log_prob, score, hit_bound))

        total, kept = top.masked_fill(ends, -math.inf).topk(min(beam_size, top.size(1)))  # (A, W)
        row, piece = row.gather(1, kept), piece.gather(1, kept)
        history = history.gather(1, row[:, :, None].expand(-1, -1, length - 1))
        history = torch.cat((history, piece[:, :, None]), dim=2)
        parents = torch.arange(len(sources))[:, None] * log_probs.size(1) + row  # (A, W)

        best_open = cast("list[float]", total[:, 0].tolist())
        keep = [
            a
            for a, source in enumerate(sources)
            if not is_done(found[source], best_open[a], max_lengths[source], beam_size, alpha, num_best)
        ]
        sources, total, history = [sources[a] for a in keep], total[keep], history[keep]
        parents, last = parents[keep].flatten().to(device), piece[keep].flatten().to(device)
    return [sorted(hypotheses, key=lambda h: -h.score)[:num_best] for hypotheses in found]


def is_done(found: list[Hypothesis], best_open: float, bound: int, beam_size: int, alpha: float, num_best: int) -> bool:
    """Whether a source's search may end; a log-probability only falls, so best_open / lp(bound) is a limit."""
    if best_open == -math.inf or len(found) >= beam_size:
        return True
    if len(found) < num_best:
        return False
    return sorted(h.score for h in found)[-num_best] >= best_open / length_penalty(bound, alpha)


def greedy_search(
    step: Step,
    max_lengths: Sequence[int],
    eos_id: int,
    *,
    alpha: float = 0.6,
    prefixes: Sequence[Sequence[int]] | None = None,
    unwritable: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """The most probable piece at every step: one hypothesis for each source."""
    return single_paths(
        step, max_lengths, eos_id, lambda log_probs, rows, length: log_probs.argmax(-1), alpha, prefixes, unwritable
    )


def sampling_search(
    step: Step,
    max_lengths: Sequence[int],
    eos_id: int,
    *,
    seeds: Sequence[int],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    alpha: float = 0.6,
    num_best: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
    unwritable: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """`num_best` samples of each source, best first; what is drawn depends on the source's own seed alone."""
    luck = [
        torch.rand(num_best, bound, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed, bound in zip(seeds, max_lengths, strict=True)
    ]

    def draw(log_probs: Tensor, rows: list[int], length: int) -> Tensor:
        probs, order = (log_probs.double() / temperature).softmax(-1).sort(descending=True, stable=True)
        if top_k:
            probs[:, top_k:] = 0
        before = probs.cumsum(-1) - probs  # what more probable pieces hold
        probs = probs.masked_fill(before >= top_p * probs.sum(-1, keepdim=True), 0)
        upto = probs.cumsum(-1)
        u = torch.stack([luck[row // num_best][row % num_best, length - 1] for row in rows]).to(upto.device)
        chosen = torch.searchsorted(upto, u[:, None] * upto[:, -1:], right=True).clamp_(max=probs.size(-1) - 1)
        return order.gather(1, chosen)[:, 0]

    return single_paths(step, max_lengths, eos_id, draw, alpha, prefixes, unwritable, num_best)


def single_paths(
    step: Step,
    max_lengths: Sequence[int],
    eos_id: int,
    choose: Callable[[Tensor, list[int], int], Tensor],
    alpha: float,
    prefixes: Sequence[Sequence[int]] | None,
    unwritable: Tensor | None,
    num_paths: int = 1,
) -> list[list[Hypothesis]]:
    """Independent hypotheses, `num_paths` of each source, each extended by choose(log_probs, rows, length)."""
    sources = [source for source in range(len(max_lengths)) for _ in range(num_paths)]
    rows = list(range(len(sources)))  # the open ones
    pieces: list[list[int]] = [[] for _ in sources]
    log_prob = [0.0] * len(sources)
    parents, last, length = torch.tensor(sources), None, 0
    while rows:
        length += 1
        log_probs = step(last, parents)  # (R, V)
        open_sources = [sources[row] for row in rows]
        forced = forced_pieces(open_sources, max_lengths, length, prefixes, eos_id)
        log_probs = constrain(log_probs[:, None], forced, unwritable)[:, 0]
        last = choose(log_probs, rows, length)
        chosen = log_probs.gather(1, last[:, None])[:, 0]
        drawn = cast("list[int]", last.tolist()), cast("list[float]", chosen.tolist())
        for row, piece, value in zip(rows, *drawn, strict=True):
            pieces[row].append(piece)
            log_prob[row] += value
        keep = [i for i, row in enumerate(rows) if pieces[row][-1] != eos_id]
        rows = [rows[i] for i in keep]
        parents = torch.tensor(keep, dtype=torch.long, device=log_probs.device)
        last = last[parents]
    found: list[list[Hypothesis]] = [[] for _ in max_lengths]
    for source, path, value in zip(sources, pieces, log_prob, strict=True):
        score = value / length_penalty(len(path), alpha)
        found[source].append(Hypothesis(tuple(path[:-1]), value, score, len(path) == max_lengths[source]))
    return [sorted(hypotheses, key=lambda h: -h.score) for hypotheses in found]


def forced_pieces(
    sources: Sequence[int],
    max_lengths: Sequence[int],
    length: int,
    prefixes: Sequence[Sequence[int]] | None,
    eos_id: int,
) -> list[int | None]:
    """The piece that each source must take at this length: the end at its bound, or its prefix's, or none."""
    forced: list[int | None] = []
    for source in sources:
        prefix = prefixes[source] if prefixes else ()
        if length >= max_lengths[source]:
            forced.append(eos_id)
        else:
            forced.append(prefix[length - 1] if length <= len(prefix) else None)
    return forced


def constrain(log_probs: Tensor, forced: list[int | None], unwritable: Tensor | None) -> Tensor:
    """Leave only the forced piece to the sources that have one, and no unwritable one to the others; (A, W, V)."""
    if unwritable is None and all(piece is None for piece in forced):
        return log_probs
    allowed = log_probs.clone()  # it may be a view of the caller's
    if unwritable is not None:
        allowed[:, :, unwritable] = -math.inf
    for a, piece in enumerate(forced):
        if piece is not None:
            allowed[a] = -math.inf
            allowed[a, :, piece] = log_probs[a, :, piece]
    return allowed


def ensemble(steps: Sequence[Step]) -> Step:
    """Several models with one vocabulary as one: the mean of their probabilities."""
    if len(steps) == 1:
        return steps[0]

    def step(last: Tensor | None, parents: Tensor) -> Tensor:
        log_probs = torch.stack([one(last, parents) for one in steps])
        return log_probs.logsumexp(0) - math.log(len(steps))

    return step
