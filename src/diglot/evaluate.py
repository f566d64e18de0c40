"""Scores of translations against references, by sacreBLEU, each with the signature that makes it comparable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from diglot.errors import TextError

# how BLEU splits words: Chinese by sacreBLEU's own rule, by characters where words are not written apart
TOKENIZERS = {"zh": "zh", "yue": "zh", "ja": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}


@dataclass(frozen=True)
class Score:
    """A score and how to repeat it."""

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f} ({self.signature})"


def bleu_tokenizer(language: str) -> str:
    """SacreBLEU's tokeniser for a language; 13a, its default, for most."""
    return TOKENIZERS.get(language.replace("_", "-").split("-")[0], "13a")


def evaluate(hypotheses: Sequence[str], references: Sequence[str], language: str = "") -> list[Score]:
    """BLEU, chrF and TER of a whole text; `language`, of the references, chooses how BLEU splits words.

    >>> [f"{score.name} {score.value:.1f}" for score in evaluate(["a small dog runs ."], ["a small dog runs ."])]
    ['BLEU 100.0', 'chrF2 100.0', 'TER 0.0']
    """
    check_lengths(hypotheses, references)
    asian = bleu_tokenizer(language) != "13a"
    metrics = (BLEU(tokenize=bleu_tokenizer(language)), CHRF(), TER(normalized=asian, asian_support=asian))
    return [score_with(metric, hypotheses, references) for metric in metrics]


def bleu(hypotheses: Sequence[str], references: Sequence[str], language: str = "") -> Score:
    """BLEU alone, as training validates."""
    check_lengths(hypotheses, references)
    return score_with(BLEU(tokenize=bleu_tokenizer(language)), hypotheses, references)


def score_with(metric: BLEU | CHRF | TER, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
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
