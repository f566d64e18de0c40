"""What `diglot evaluate` says of a test text and of one system or several: as JSON and as text to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import diglot
from diglot.checkpoint import find_model, list_steps
from diglot.config import DataConfig, Recipe, from_dict, read_toml
from diglot.corpus import cache_directory, open_pairs
from diglot.evaluate import (
    LENGTH_NAMES,
    MOST_RESAMPLED,
    Flaws,
    Part,
    Score,
    check_lengths,
    compare,
    count_flaws,
    evaluate,
    lengths_of,
    score_parts,
    words_of,
    worst_lines,
)
from diglot.leaks import Leaks, find_leaks
from diglot.progress import Reporter
from diglot.robustness import variants
from diglot.run import STATE
from diglot.runs import in_columns
from diglot.translator import Translator, load


@dataclass(frozen=True)
class TestText:
    """A test set, and how its references are split into words."""

    src: list[str] | None
    ref: list[str]
    origins: list[str] | None = None  # where each line is from
    language: str | None = None  # that of the first model, if it is not said
    tokenized: bool = False

    @property
    def how(self) -> tuple[str, bool]:
        """How BLEU splits words."""
        return self.language or "", self.tokenized

    def check(self, names: Sequence[str]) -> None:
        """Refuse files (source, references, origins) of unequal length."""
        for name, lines in zip(names, (self.src, self.ref, self.origins), strict=True):
            if lines is not None:
                check_lengths(lines, self.ref, (name, names[1]))


@dataclass
class System:
    """What is evaluated: translations, and the model that made them, if it is here."""

    name: str
    hypotheses: list[str]
    model: dict[str, Any] | None = None
    # of a model that is tested for it: how a variant is named, its scores, its flaws
    robustness: list[tuple[str, list[Score], Flaws]] = field(default_factory=list[tuple[str, list[Score], Flaws]])


def translate(translator: Translator, lines: Sequence[str], reporter: Reporter, **options: Any) -> list[str]:
    """The translations of lines, under a progress bar."""
    with reporter.bar("translating", len(lines)) as advance:
        found: list[str] = []
        for one in translator.translate_lines(lines, **options):
            found.append(one.text)
            advance(1, "")
    return found


def try_variants(system: System, test: TestText, say: Callable[[list[str]], list[str]]) -> None:
    """Score what `say` makes of the sources, altered in several ways."""
    words = words_of(*test.how)
    for name, (src, ref) in variants(test.src or [], test.ref, test.language or "").items():
        found = say(src)
        scores = evaluate(found, ref, *test.how)
        system.robustness.append((name, scores, count_flaws(found, ref, words)))


def facts_of(path: Path, translator: Translator) -> dict[str, Any]:
    """The size of a model and, if it lies in its run directory, what the training took."""
    facts: dict[str, Any] = {"parameters": translator.num_parameters, "search": asdict(translator.spec.search)}
    if (run := run_of(path)) and (steps := list_steps(run)):
        state = json.loads((steps[-1] / STATE).read_bytes())
        facts["training"] = {name: state[name] for name in ("update", "epoch", "pieces", "seconds")}
    return facts


def run_of(path: Path) -> Path | None:
    """The run directory that a model lies in, or that is named in its place."""
    model = find_model(path).absolute()
    return model.parent if (model.parent / "config.toml").exists() else None


def training_text(models: Sequence[str], train: tuple[str, str] | None, reporter: Reporter) -> DataConfig | None:
    """What to look for test lines in: what is named, or else the text of the first model's run."""
    if train:
        return DataConfig(src=(train[0],), tgt=(train[1],))
    if not models or not (run := run_of(Path(models[0]))):
        return None
    data = from_dict(Recipe, read_toml(run / "config.toml"), str(run / "config.toml")).data
    for name in (*data.src, *data.tgt, *data.tsv):
        if not Path(name).exists():
            reporter.say(
                f"The text that {run} was trained on is not here ({name}): no test lines are looked for in it; "
                "name it with --train."
            )
            return None
    return data


def look_for_leaks(test: TestText, data: DataConfig, reporter: Reporter) -> dict[str, Leaks]:
    """The test lines that stand in the training text, by side."""
    files = open_pairs(data.src, data.tgt, data.tsv, cache_directory())
    with reporter.bar("looking for leaks", sum(file.src.num_lines for file in files)) as advance:
        found = find_leaks((test.src, test.ref), files, advance)
    return {side: leaks for side, leaks in zip(("src", "ref"), found, strict=True) if leaks}


# ------------------------------------------------------------------- the report


@dataclass(frozen=True)
class Judgement:
    """All that is said of a system."""

    system: System
    scores: list[Score]
    flaws: Flaws
    by_length: list[Part]
    by_origin: list[Part]
    worst: list[tuple[int, float]]  # lines, from 0, and their chrF

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""

        def parts(found: Sequence[Part]) -> list[dict[str, Any]]:
            return [{"name": part.name, "lines": part.num_lines, "scores": scored(part.scores)} for part in found]

        return {
            "name": self.system.name,
            "model": self.system.model,
            "scores": scored(self.scores),
            "flaws": asdict(self.flaws),
            "by_length": parts(self.by_length),
            "by_origin": parts(self.by_origin),
            "worst": [{"line": i + 1, "chrF2": chrf} for i, chrf in self.worst],
            "robustness": [
                {"name": name, "scores": scored(scores), "flaws": asdict(flaws)}
                for name, scores, flaws in self.system.robustness
            ],
        }

    def as_lines(self, test: TestText) -> list[str]:
        """To read."""
        header = ("", "LINES", *(score.name for score in self.by_length[0].scores))
        parts = (*self.by_length, *self.by_origin)
        lines = in_columns([header, *((part.name, f"{part.num_lines:,}", *values(part.scores)) for part in parts)])
        if self.system.robustness:
            header = ("", *(score.name for score in self.scores), "NO TRANSLATIONS")
            every = [("as it is", self.scores, self.flaws), *self.system.robustness]
            rows = [(name, *values(scores), said(flaws)) for name, scores, flaws in every]
            lines += ["", *in_columns([header, *rows])]
        else:
            lines += ["", f"No translations: {said(self.flaws)}."]
        lines += ["", "The worst lines, by chrF:" if self.worst else "Every line is its reference."]
        for i, chrf in self.worst:
            lines.append(f"  line {i + 1:,}: {chrf:.1f}")
            lines += [f"    source       {test.src[i]}"] if test.src else []
            lines += [f"    translation  {self.system.hypotheses[i]}", f"    reference    {test.ref[i]}"]
        return lines


@dataclass(frozen=True)
class Report:
    """All that is said of some systems."""

    test: TestText
    judgements: list[Judgement]
    leaks: dict[str, Leaks] | None  # by side; None: there was no training text to look in

    def warning(self) -> str:
        """The leaks in a sentence; nothing, if there are none."""
        leaks = self.leaks or {}
        if not any(one.exact or one.near for one in leaks.values()):
            return ""
        words = {"src": "sources", "ref": "references"}
        counts = "; ".join(
            f"{len(one.exact):,} {words[side]} word for word and {len(one.near):,} nearly"
            for side, one in leaks.items()
        )
        return (
            f"warning: of {len(self.test.ref):,} test lines there stand in the training text {counts} (--json names "
            "the lines)."
        )

    def as_json(self) -> str:
        """For programs. It has numbers of lines, from 1, and no line itself: the text may not be for all."""
        leaks = self.leaks and {
            side: {"exact": [i + 1 for i in one.exact], "near": [i + 1 for i in one.near]}
            for side, one in self.leaks.items()
        }
        report = {
            "diglot": diglot.__version__,
            "lines": len(self.test.ref),
            "language": self.test.language or "",
            "systems": [one.as_dict() for one in self.judgements],
            "leaks": leaks,
        }
        return json.dumps(report, ensure_ascii=False)

    def as_text(self) -> str:
        """To read."""
        judgements, lines = self.judgements, list[str]()
        for one in judgements:
            lines += [f"{one.system.name}:"] if len(judgements) > 1 else []
            lines += map(str, one.scores)
        if len(judgements) > 1:
            lines += ["", f"Difference to {judgements[0].system.name}, and how probable one so large is by chance:", ""]
            lines += in_columns(comparison(judgements))
        if self.leaks is not None:
            lines += ["", self.warning() or "No test line stands in the training text, exactly or nearly."]
        for one in judgements:
            lines += ["", f"{one.system.name}, {len(self.test.ref):,} lines", "", *one.as_lines(self.test)]
        return "\n".join(lines)


def evaluate_systems(
    test: TestText,
    models: Sequence[str],
    outputs: Sequence[tuple[str, list[str]]],
    *,
    robustness: bool,
    train: tuple[str, str] | None,
    reporter: Reporter,
    options: dict[str, Any],
    how: dict[str, Any],
) -> Report:
    """Translate with each model, score that and the given outputs, look for leaks. `options` are of the translation,
    `how` of the machine it is done on."""
    for name, hypotheses in outputs:
        check_lengths(hypotheses, test.ref, (name, "the reference"))
    systems: list[System] = []
    for name in models:
        translator = load(name, **how)
        if test.language is None:
            test = replace(test, language=options.get("to") or translator.spec.languages.tgt)
        say = partial(translate, translator, reporter=reporter, **options)
        systems.append(System(name, say(test.src or []), facts_of(Path(name), translator)))
        if robustness:
            try_variants(systems[-1], test, say)
    systems += [System(name, hypotheses) for name, hypotheses in outputs]
    data = training_text(models, train, reporter)
    leaks = look_for_leaks(test, data, reporter) if data else None
    if len(test.ref) > MOST_RESAMPLED:
        reporter.say(f"Over {MOST_RESAMPLED:,} lines are not resampled: there are no intervals, and no test.")
    return Report(test, judge(systems, test), leaks)


def judge(systems: Sequence[System], test: TestText) -> list[Judgement]:
    """Score the systems; each but the first is compared with the first."""
    if len(test.ref) > MOST_RESAMPLED:
        scores = [evaluate(one.hypotheses, test.ref, *test.how) for one in systems]
    else:
        scores = compare([(one.name, one.hypotheses) for one in systems], test.ref, *test.how)
    words = words_of(*test.how)
    lengths = lengths_of(test.ref, words)
    return [
        Judgement(
            one,
            own,
            count_flaws(one.hypotheses, test.ref, words),
            sorted(
                score_parts(one.hypotheses, test.ref, lengths, *test.how),
                key=lambda part: LENGTH_NAMES.index(part.name),
            ),
            score_parts(one.hypotheses, test.ref, test.origins, *test.how) if test.origins else [],
            worst_lines(one.hypotheses, test.ref),
        )
        for one, own in zip(systems, scores, strict=True)
    ]


def scored(scores: Sequence[Score]) -> dict[str, Any]:
    """Scores by name, for JSON."""
    return {
        one.name: {key: value for key, value in asdict(one).items() if key != "name" and value is not None}
        for one in scores
    }


def values(scores: Sequence[Score]) -> list[str]:
    """The figures alone."""
    return [f"{score.value:.2f}" for score in scores]


def said(flaws: Flaws) -> str:
    """Flaws in words."""
    return f"{flaws.empty:,} empty, {flaws.loops:,} loops, {flaws.too_long:,} over-long"


def comparison(judgements: Sequence[Judgement]) -> list[tuple[str, ...]]:
    """A row for each score of each system but the first."""
    first = judgements[0].scores
    rows: list[tuple[str, ...]] = [("SYSTEM", "SCORE", "DIFFERENCE", "BOOTSTRAP", "RANDOMIZATION")]
    for one in judgements[1:]:
        for score, base in zip(one.scores, first, strict=True):
            chances = (score.p_bootstrap, score.p_randomization)
            shown = ["not tested" if p is None else f"p = {p:.4f}" for p in chances]
            rows.append((one.system.name, score.name, f"{score.value - base.value:+.2f}", *shown))
    return rows
