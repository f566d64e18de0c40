"""Scores are sacreBLEU's own, and say how to repeat them."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import sacrebleu

from diglot.errors import TextError
from diglot.evaluate import (
    LENGTH_NAMES,
    Flaws,
    bleu,
    bleu_tokenizer,
    compare,
    count_flaws,
    evaluate,
    lengths_of,
    score_parts,
    words_of,
    worst_lines,
)

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


def test_tokenised_text_is_scored_as_multi_bleu_does():
    hypotheses = ["two men , a cat and a dog run .", "a rich ##AT##-##AT## text format is used here today"] * 3
    references = ["two men , the cat and a dog run !", "the rich ##AT##-##AT## text format is used here today"] * 3
    grams = [
        [Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)) for n in range(1, 5)]
        for words in (line.split() for line in (*hypotheses, *references))
    ]
    precisions = [
        sum((one[n] & two[n]).total() for one, two in zip(grams[:6], grams[6:], strict=True))
        / sum(one[n].total() for one in grams[:6])
        for n in range(4)
    ]
    expected = 100 * math.exp(sum(map(math.log, precisions)) / 4)  # of equal lengths: no brevity penalty
    found = evaluate(hypotheses, references, "de", tokenized=True)[0]
    assert found.value == pytest.approx(expected)
    assert "tok:none" in found.signature
    assert evaluate(hypotheses, references, "de")[0].value != pytest.approx(expected)


# ------------------------------------------------------------------- several systems, of known difference


def planted(num_lines: int, errors: float, seed: int) -> tuple[list[str], list[str]]:
    """Translations of which each word is wrong with a probability, and their references."""
    rng = random.Random(seed)
    lines = [[f"w{rng.randrange(300)}" for _ in range(rng.randint(8, 16))] for _ in range(num_lines)]
    rng = random.Random(errors)  # another one for each system, not for each text
    wrong = [[word if rng.random() >= errors else "wrong" for word in line] for line in lines]
    return [" ".join(line) for line in wrong], [" ".join(line) for line in lines]


@pytest.mark.slow
def test_of_two_systems_the_better_is_significantly_so_and_an_equal_one_is_not():
    good, references = planted(50, 0.1, seed=1)
    alike, bad = planted(50, 0.1 + 1e-9, seed=1)[0], planted(50, 0.3, seed=1)[0]
    assert good != alike
    first, same, equal, worse = compare([("a", good), ("b", good), ("c", alike), ("d", bad)], references)
    for score in first:
        assert score.p_bootstrap is None
        assert score.p_randomization is None
    for score in same:  # sacreBLEU alone has p = 1/1001 here
        assert (score.p_bootstrap, score.p_randomization) == (1, 1)
    for score in equal:
        assert score.p_bootstrap is not None
        assert score.p_randomization is not None
        assert min(score.p_bootstrap, score.p_randomization) > 0.05
    for score in worse:
        assert score.p_bootstrap is not None
        assert score.p_randomization is not None
        assert max(score.p_bootstrap, score.p_randomization) < 0.01
    assert [one.value for one in worse] == [one.value for one in evaluate(bad, references)]
    assert all("bs:1000|ar:10000|seed:12345" in score.signature for score in (*first, *worse))


@pytest.mark.slow
def test_an_interval_holds_the_score_of_the_whole_text_nineteen_times_of_twenty():
    hypotheses, references = planted(4000, 0.2, seed=2)
    whole = evaluate(hypotheses, references)[0].value
    held = 0
    for start in range(0, 4000, 100):
        part = slice(start, start + 100)
        (score, *_) = compare([("part", hypotheses[part])], references[part])[0]
        assert score.mean is not None
        assert score.interval is not None
        assert 0 < score.interval < 10
        held += abs(score.mean - whole) <= score.interval
    assert held >= 34  # of 40; fewer than 34 have a probability of 0.3 % where each is held with 95 %


def test_an_interval_is_narrower_over_more_lines_and_the_same_each_time():
    hypotheses, references = planted(300, 0.2, seed=3)
    few, many = (compare([("a", hypotheses[:num])], references[:num])[0][0] for num in (50, 300))
    assert few.interval is not None
    assert many.interval is not None
    assert few.interval > 1.5 * many.interval
    assert few == compare([("a", hypotheses[:50])], references[:50])[0][0]
    assert f" ± {few.interval:.2f} (nrefs:1|bs:1000|seed:12345|" in str(few)


# ------------------------------------------------------------------- parts, single lines, flaws


def test_the_scores_of_parts_are_those_of_their_lines():
    hypotheses, references = planted(60, 0.2, seed=4)
    names = ["news" if i % 3 else "talks" for i in range(60)]
    for part in score_parts(hypotheses, references, names):
        own = [i for i in range(60) if names[i] == part.name]
        scores = evaluate([hypotheses[i] for i in own], [references[i] for i in own])[:2]
        assert (part.num_lines, part.scores) == (len(own), scores)


@pytest.mark.parametrize(
    ("num", "part"),
    [(0, "up to 10"), (10, "up to 10"), (11, "11-20"), (20, "11-20"), (31, "31-50"), (50, "31-50"), (51, "over 50")],
)
def test_a_line_is_of_the_part_of_its_length(num: int, part: str):
    assert lengths_of(["a " * num], words_of("en")) == [f"{part} words"]
    assert f"{part} words" in LENGTH_NAMES
    assert lengths_of(["好" * num], words_of("zh")) == [f"{part} words"]


def test_the_worst_lines_are_those_that_were_spoilt():
    hypotheses, references = planted(50, 0.1, seed=5)
    for i in (7, 31):
        hypotheses[i] = "nothing of it"
    hypotheses[40] = references[40] = ""  # right, though no n-gram of it is
    assert {i for i, _ in worst_lines(hypotheses, references, 2)} == {7, 31}
    assert worst_lines(references, references) == []
    assert len(worst_lines(hypotheses, references)) == 10


def test_outputs_that_are_no_translations_are_counted():
    words = words_of("en")
    wanted = "the man sees the dog and the cat"
    cases = {
        "": Flaws(1, 0, 0),
        "  ": Flaws(1, 0, 0),
        "the man sees the the the the dog": Flaws(0, 1, 0),
        "the man sees the the the dog": Flaws(0, 0, 0),  # three times is no loop yet
        "The dog and the cat, the dog and the cat, the dog and the cat, the dog and the cat": Flaws(0, 1, 0),
        "the man sees . . . . . .": Flaws(0, 0, 0),
        " ".join(map(str, range(26))): Flaws(0, 0, 0),
        " ".join(map(str, range(27))): Flaws(0, 0, 1),
        "so " * 40: Flaws(0, 1, 1),
        wanted: Flaws(0, 0, 0),
    }
    for hypothesis, flaws in cases.items():
        assert count_flaws([hypothesis], [wanted], words) == flaws, hypothesis
    together = count_flaws(list(cases), [wanted] * len(cases), words)
    assert together == Flaws(2, 3, 2)
    asked_for = "ha ha ha ha"
    assert count_flaws([asked_for, "", "x"], [asked_for, "", ""], words) == Flaws(0, 0, 0)
    assert count_flaws(["我喜欢我喜欢我喜欢我喜欢"], ["我很喜欢苹果。"], words_of("zh")) == Flaws(0, 1, 0)
