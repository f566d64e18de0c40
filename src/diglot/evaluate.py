"""What translations are worth beside references: sacreBLEU's scores, each with the signature that makes it comparable,
its 95 % interval and, of several systems, whether they differ; the same by part of the text; the worst lines; and
outputs that no score shows: empty ones, loops, over-long ones.

Training validates by `bleu`, on the same text and by the same code as `diglot evaluate`.
"""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from diglot.errors import ConfigError, TextError

# how BLEU splits words: Chinese by sacreBLEU's own rule, by characters where words are not written apart
TOKENIZERS = {"zh": "zh", "yue": "zh", "ja": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}
SPACES = "none"  # sacreBLEU's name for words that stand apart already
MOST_RESAMPLED = 10_000  # lines; sacreBLEU holds a thousand samples of all of them, 0.7 GB of so many
LENGTHS = (10, 20, 30, 50)  # words of a reference up to which a line is of one part
LENGTH_NAMES = (
    f"up to {LENGTHS[0]} words",
    *(f"{low + 1}-{high} words" for low, high in pairwise(LENGTHS)),
    f"over {LENGTHS[-1]} words",
)
REPEATS = 4  # times in a row that make a loop

Metric = BLEU | CHRF | TER


@dataclass(frozen=True)
class Score:
    """A score and how to repeat it."""

    name: str
    value: float
    signature: str
    interval: float | None = None  # the true score is within so much of `mean` with a confidence of 95 %
    mean: float | None = None  # of the bootstrap's samples
    p_bootstrap: float | None = None  # how probable so large a difference to the first system is by chance
    p_randomization: float | None = None

    def __str__(self) -> str:
        interval = "" if self.interval is None else f" ± {self.interval:.2f}"
        return f"{self.name} {self.value:.2f}{interval} ({self.signature})"


@dataclass(frozen=True)
class Part:
    """The scores of some of the lines."""

    name: str
    num_lines: int
    scores: list[Score]


@dataclass(frozen=True)
class Flaws:
    """How many outputs are no translations."""

    empty: int
    loops: int
    too_long: int


def bleu_tokenizer(language: str) -> str:
    """SacreBLEU's tokeniser for a language; 13a, its default, for most."""
    return TOKENIZERS.get(language.replace("_", "-").split("-")[0], "13a")


def metrics(language: str = "", tokenized: bool = False) -> dict[str, Metric]:
    """BLEU, chrF and TER for a target language; `tokenized`: words are what stands between spaces."""
    tokenizer = SPACES if tokenized else bleu_tokenizer(language)
    asian = tokenizer not in ("13a", SPACES)
    return {
        "BLEU": BLEU(tokenize=tokenizer, force=tokenized),
        "chrF": CHRF(),
        "TER": TER(normalized=asian, asian_support=asian),
    }


def evaluate(
    hypotheses: Sequence[str], references: Sequence[str], language: str = "", tokenized: bool = False
) -> list[Score]:
    """BLEU, chrF and TER of a whole text; `language`, of the references, chooses how BLEU splits words.

    >>> [f"{score.name} {score.value:.1f}" for score in evaluate(["a small dog runs ."], ["a small dog runs ."])]
    ['BLEU 100.0', 'chrF2 100.0', 'TER 0.0']
    """
    check_lengths(hypotheses, references)
    return [score_with(metric, hypotheses, references) for metric in metrics(language, tokenized).values()]


def bleu(hypotheses: Sequence[str], references: Sequence[str], language: str = "") -> Score:
    """BLEU alone, as training validates."""
    check_lengths(hypotheses, references)
    return score_with(metrics(language)["BLEU"], hypotheses, references)


def score_with(metric: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """One score with its signature."""
    result = metric.corpus_score(hypotheses, [references])
    return Score(result.name, result.score, str(metric.get_signature()))


def check_lengths(
    one: Sequence[str], two: Sequence[str], names: tuple[str, str] = ("the translation", "the reference")
) -> None:
    """Refuse to compare texts of unequal length."""
    if len(one) != len(two):
        raise TextError(
            f"{names[0]} has {len(one):,} lines and {names[1]} has {len(two):,}; they must match line by line."
        )
    if not two:
        raise TextError(f"{names[1]} is empty: there is no line to evaluate.")


# ------------------------------------------------------------------- intervals, and several systems


def compare(
    systems: Sequence[tuple[str, Sequence[str]]],
    references: Sequence[str],
    language: str = "",
    tokenized: bool = False,
) -> list[list[Score]]:
    """The scores of each system with their intervals; of each but the first the probability that it differs so much
    from the first by chance, by paired bootstrap (Koehn 2004) and approximate randomization (Riezler and Maxwell 2005).
    The tests are sacreBLEU's own."""
    from sacrebleu.significance import PairedTest, Result

    for name, hypotheses in systems:
        check_lengths(hypotheses, references, (name, "the reference"))
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    if not re.fullmatch(r"\d+|none", seed, re.IGNORECASE | re.ASCII):
        raise ConfigError(f"SACREBLEU_SEED = {seed!r} must be a whole number, or none; or leave it unset.")
    named: list[tuple[str, Sequence[str]]] = [(name, list(hypotheses)) for name, hypotheses in systems]
    bootstrap = PairedTest(named, metrics(language, tokenized), [references], "bs")
    signatures, found = bootstrap()
    others: dict[str, list[Result]] = {}
    if len(systems) > 1:
        randomization = PairedTest(named, metrics(language, tokenized), [references], "ar")
        others = cast("dict[str, list[Result]]", randomization()[1])
        for signature in signatures.values():
            signature.update("ar", randomization.n_samples)
    scores: list[list[Score]] = [[] for _ in systems]
    for metric, signature in signatures.items():
        results = cast("list[Result]", found[metric])
        for i, one in enumerate(results):
            spread = [None if number is None else float(number) for number in (one.ci, one.mean)]
            score = Score(metric, one.score, str(signature), *spread)
            if i:
                # for two outputs that are alike sacreBLEU has the least p there is, for it counts what is above 0
                is_equal = one.score == results[0].score
                chances = [1.0 if is_equal else result.p_value for result in (one, others[metric][i])]
                score = replace(score, p_bootstrap=chances[0], p_randomization=chances[1])
            scores[i].append(score)
    return scores


# ------------------------------------------------------------------- parts of the text, single lines


def words_of(language: str, tokenized: bool = False) -> Callable[[str], list[str]]:
    """What splits a text as BLEU does."""
    tokenizer = cast("BLEU", metrics(language, tokenized)["BLEU"]).tokenizer
    return lambda text: tokenizer(text).split()


def lengths_of(references: Iterable[str], words: Callable[[str], list[str]]) -> list[str]:
    """The name of the part that each line is of by the words of its reference."""
    return [LENGTH_NAMES[bisect.bisect_left(LENGTHS, len(words(text)))] for text in references]


def score_parts(
    hypotheses: Sequence[str],
    references: Sequence[str],
    parts: Sequence[str],
    language: str = "",
    tokenized: bool = False,
) -> list[Part]:
    """BLEU and chrF of each part of the text, given the name of the part that each line is of."""
    lines_of: dict[str, list[int]] = {}
    for i, name in enumerate(parts):
        lines_of.setdefault(name, []).append(i)
    chosen = [metric for name, metric in metrics(language, tokenized).items() if name != "TER"]
    return [
        Part(
            name,
            len(lines),
            [score_with(metric, [hypotheses[i] for i in lines], [references[i] for i in lines]) for metric in chosen],
        )
        for name, lines in lines_of.items()
    ]


def worst_lines(hypotheses: Sequence[str], references: Sequence[str], num: int = 10) -> list[tuple[int, float]]:
    """The lines, from 0, of the lowest chrF, and their chrF; a line that is its reference is never among them."""
    metric = CHRF()
    scores = [
        (metric.sentence_score(hypothesis, [reference]).score, i)
        for i, (hypothesis, reference) in enumerate(zip(hypotheses, references, strict=True))
        if hypothesis != reference
    ]
    return [(i, score) for score, i in sorted(scores)[:num]]


def count_flaws(hypotheses: Sequence[str], references: Sequence[str], words: Callable[[str], list[str]]) -> Flaws:
    """Outputs that are empty where the reference is not; that say the same words four times in a row or more, where the
    reference does not; that have over twice the reference's words and ten more."""
    empty = loops = too_long = 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        own, wanted = (words(text.casefold()) for text in (hypothesis, reference))
        empty += not own and bool(wanted)
        loops += has_loop(own) and not has_loop(wanted)
        too_long += len(own) > 2 * len(wanted) + 10
    return Flaws(empty, loops, too_long)


def has_loop(words: Sequence[str]) -> bool:
    """Whether one or more words, whatever is between them, stand four times in a row.

    >>> [has_loop(text.split()) for text in ("on and on and on and on", "on and on and on and on , and", ". . . . .")]
    [False, True, False]
    """
    spoken = [word for word in words if any(map(str.isalnum, word))]
    for period in range(1, len(spoken) // REPEATS + 1):
        run = 0
        for i in range(period, len(spoken)):
            run = run + 1 if spoken[i] == spoken[i - period] else 0
            if run == (REPEATS - 1) * period:
                return True
    return False
