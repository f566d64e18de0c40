"""Which word of a translation stands for which of its source, read from the cross attention.

Two pieces are linked where each is the other's choice: the target piece looks at none of the source more, and no piece
of the target looks at the source piece more. Words are linked where pieces of them are; a word that is left alone goes
with the one that it looks at most, or that looks at it most. Not all heads look at what is
being translated, so the layer and the heads to read are chosen, without a text aligned by hand, by agreement: what one
half of a text says about which pieces go together has to hold in the other half. (Liang et al. 2006 align by agreement
of two directions; Chen et al. 2020 choose a layer by it. Here one network is enough.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from diglot.config import AlignmentConfig
from diglot.errors import ConfigError, TextError
from diglot.translator import Attention, Translator, Weights

Links = frozenset[tuple[int, int]]  # (source, target): words, or pieces, counted from 0
LONGEST = 400  # characters; longer pairs take long and tell little more
TIE = 0.01  # of the best agreement
ENOUGH = 500  # pairs to choose by


def align(attention: Attention, config: AlignmentConfig) -> Links:
    """Which words of a pair stand for each other, read from the chosen heads."""
    src_words, tgt_words = attention.src_words, attention.tgt_words
    if not src_words or not tgt_words:
        return frozenset()
    src_word, tgt_word = (
        {piece: number for number, span in enumerate(spans) for piece in range(*span)}
        for spans in (src_words, tgt_words)
    )
    first = src_words[0][0]
    heads = [head - 1 for head in config.heads]
    cross = attention.cross[config.layer - 1, heads, :-1, first:-1].mean(0)  # neither tag nor end
    links = {(src_word[first + i], tgt_word[j]) for i, j in mutual(cross)}
    of_words = np.add.reduceat(cross, [start - first for start, _ in src_words], axis=1)
    of_words = np.add.reduceat(of_words, [start for start, _ in tgt_words], axis=0)
    of_words /= np.array([[end - start] for start, end in tgt_words])  # the mean of the word's pieces
    links |= {(i, int(of_words[:, i].argmax())) for i in set(range(len(src_words))) - {i for i, _ in links}}
    links |= {(int(of_words[j].argmax()), j) for j in set(range(len(tgt_words))) - {j for _, j in links}}
    return frozenset(links)


def align_pairs(
    translator: Translator,
    pairs: Iterable[tuple[str, str]],
    *,
    to: str | Sequence[str] | None = None,
    choose: bool = False,
) -> Iterator[Links]:
    """The links of each pair as it arrives, read from the heads that the model names; with `choose`, from those that
    these pairs choose, all of which are read first."""
    config = translator.spec.alignment
    if choose:
        pairs = list(pairs)
        config = choose_heads_by(translator, pairs, to=to)
    if not config.layer:
        raise ConfigError(
            f"{translator.path} does not say which of its heads align words; choose them by a text, at best of some "
            "hundred pairs: --choose (in Python: choose=True)."
        )
    return (align(one, config) for one in translator.attend_pairs(pairs, to=to))


def choose_heads_by(
    translator: Translator, pairs: Sequence[tuple[str, str]], *, to: str | Sequence[str] | None = None
) -> AlignmentConfig:
    """The heads that agree best over a text, or over so much of it as it takes."""
    kept = [i for i, pair in enumerate(pairs) if max(map(len, pair)) <= LONGEST][:ENOUGH]
    languages = to if to is None or isinstance(to, str) else [to[i] for i in kept]
    return choose_heads(translator.attend_pairs([pairs[i] for i in kept], to=languages))


def mutual(weights: Weights) -> list[tuple[int, int]]:
    """The pieces, of the source and of the target, that are each other's choice; (T, S).

    >>> mutual(np.array([[0.9, 0.1], [0.6, 0.4]]))
    [(0, 0)]
    """
    rows = weights.argmax(0)  # for each source piece, who looks at it most
    return [(i, j) for j, i in enumerate(weights.argmax(1).tolist()) if rows[i] == j]


def choose_heads(attentions: Iterable[Attention]) -> AlignmentConfig:
    """The layer and the heads of it whose links agree best over a text."""
    pairs = [
        (one.src[:-1], one.tgt[:-1], one.cross[:, :, :-1, :-1]) for one in attentions if len(one.src) > 1 < len(one.tgt)
    ]
    if len(pairs) < 2:
        raise TextError("there is too little text to choose by which heads align: give at least two pairs of lines.")
    num_layers, num_heads = pairs[0][2].shape[:2]
    found: list[tuple[float, AlignmentConfig]] = []
    for layer in range(num_layers):

        def agreement_of(heads: list[int], layer: int = layer) -> float:
            return agreement([(src, tgt, mutual(cross[layer, heads].mean(0))) for src, tgt, cross in pairs])

        ranked = sorted(range(num_heads), key=lambda head: -agreement_of([head]))
        for num in range(1, num_heads + 1):
            chosen = AlignmentConfig(layer + 1, tuple(sorted(head + 1 for head in ranked[:num])))
            found.append((agreement_of(ranked[:num]), chosen))
    best = max(score for score, _ in found)
    # of those that can hardly be told from the best, the mean of most heads: it is the steadier one
    return max((config for score, config in found if score >= best - TIE * abs(best)), key=lambda one: len(one.heads))


def agreement(linked: Sequence[tuple[Sequence[str], Sequence[str], list[tuple[int, int]]]]) -> float:
    """How much the links of one half of a text say about those of the other, in nats a target piece: the mean of
    log(P(source piece | target piece) / P(source piece)), with the probabilities of the other half. A head that always
    looks at the end, or anywhere, says nothing; one that is late by a piece says little."""
    total, num_pieces = 0.0, sum(len(tgt) for _, tgt, _ in linked)
    for half in (0, 1):
        known = [(src[i], tgt[j]) for src, tgt, links in linked[half::2] for i, j in links]
        together, of_src, of_tgt = Counter(known), Counter(i for i, _ in known), Counter(j for _, j in known)
        for src, tgt, links in linked[1 - half :: 2]:
            for i, j in links:
                by_chance = (of_src[src[i]] + 1) / (len(known) + len(of_src) + 1)
                total += math.log((together[src[i], tgt[j]] + by_chance) / (of_tgt[tgt[j]] + 1) / by_chance)
    return total / max(1, num_pieces)


def to_pharaoh(links: Links) -> str:
    """As "0-0 1-2": source and target words, counted from 0."""
    return " ".join(f"{i}-{j}" for i, j in sorted(links))


def from_pharaoh(line: str, where: str = "") -> Links:
    """The links of a line; what is written "1?2" or "1p2", a possible link, is not read."""
    try:
        return frozenset((int(i), int(j)) for i, _, j in (link.partition("-") for link in line.split()))
    except ValueError:
        raise TextError(f"{where or 'the alignment'}: '{line[:40]}' is not in Pharaoh format, as 0-0 1-2.") from None


def alignment_error(found: Sequence[Links], true: Sequence[Links]) -> float:
    """AER (Och and Ney 2003) where all true links are sure: 1 - 2 |A and S| / (|A| + |S|) over all pairs."""
    both = sum(len(a & b) for a, b in zip(found, true, strict=True))
    return 1 - 2 * both / max(1, sum(map(len, found)) + sum(map(len, true)))
