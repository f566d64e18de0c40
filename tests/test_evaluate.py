"""Scores are sacreBLEU's own, and say how to repeat them."""

from __future__ import annotations

import pytest
import sacrebleu

from diglot.errors import TextError
from diglot.evaluate import bleu, bleu_tokenizer, evaluate

HYPOTHESES = [
    "A small dog runs across the grass .",
    "Two men are talking , and laughing",
    "",
    "the same line",
    "ünd Ähren",
]
REFERENCES = ["A little dog runs over the grass .", "Two men talk and laugh .", "a line", "the same line", "und Ähren"]
CHINESE = (
    ["我喜欢吃苹果。", "他昨天去了北京，今天回来。", "你好"],
    ["我很喜欢苹果。", "他昨天去北京，今天回来了。", "您好"],
)


@pytest.mark.parametrize("language", ["", "en", "de", "de-AT"])
def test_scores_are_those_of_sacrebleu(language: str) -> None:
    scores = evaluate(HYPOTHESES, REFERENCES, language)
    assert [score.name for score in scores] == ["BLEU", "chrF2", "TER"]
    assert [score.value for score in scores] == [
        sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score,
        sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score,
        sacrebleu.corpus_ter(HYPOTHESES, [REFERENCES]).score,
    ]
    assert 0 < scores[0].value < 100


@pytest.mark.parametrize("language", ["zh", "zh-CN", "zh_TW", "yue"])
def test_chinese_is_split_as_sacrebleu_does(language: str) -> None:
    found, references = CHINESE
    scores = evaluate(found, references, language)
    assert [score.value for score in scores] == [
        sacrebleu.corpus_bleu(found, [references], tokenize="zh").score,
        sacrebleu.corpus_chrf(found, [references]).score,
        sacrebleu.corpus_ter(found, [references], normalized=True, asian_support=True).score,
    ]
    assert scores[0].value > sacrebleu.corpus_bleu(found, [references]).score


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [("", "13a"), ("en", "13a"), ("zh", "zh"), ("zh-Hans-CN", "zh"), ("ja", "char"), ("th_TH", "char"), ("zha", "13a")],
)
def test_the_language_chooses_how_words_are_split(language: str, tokenizer: str) -> None:
    assert bleu_tokenizer(language) == tokenizer
    assert f"tok:{tokenizer}" in bleu(HYPOTHESES, REFERENCES, language).signature


def test_each_score_carries_its_signature() -> None:
    for score in evaluate(HYPOTHESES, REFERENCES):
        assert f"version:{sacrebleu.__version__}" in score.signature
        assert "nrefs:1" in score.signature
        assert str(score) == f"{score.name} {score.value:.2f} ({score.signature})"


def test_bleu_alone_is_the_bleu_of_all() -> None:
    assert bleu(HYPOTHESES, REFERENCES, "de") == evaluate(HYPOTHESES, REFERENCES, "de")[0]


def test_the_same_text_has_the_best_scores() -> None:
    assert [round(score.value, 6) for score in evaluate(REFERENCES, REFERENCES)] == [100, 100, 0]


@pytest.mark.parametrize("score", [evaluate, bleu])
def test_texts_of_unequal_length_or_of_none_are_refused(score: object) -> None:
    assert callable(score)
    with pytest.raises(
        TextError, match=r"^the translation has 1,200 lines and the reference has 1; they must match line by line\.$"
    ):
        score(["a"] * 1200, ["a"])
    with pytest.raises(TextError, match="there is no line to evaluate"):
        score([], [])
