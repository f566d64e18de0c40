"""What `diglot evaluate` says of a test text and of one system or several: as JSON and as text to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import diglot
from diglot.checkpoint import find_model, list_steps
from diglot.config import DataConfig, Recipe, from_dict, read_toml
from diglot.corpus import cache_directory, open_pairs
from diglot.errors import TextError
from diglot.evaluate import (
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
from diglot.progress import Reporter, in_columns
from diglot.robustness import variants
from diglot.run import STATE
from diglot.translator import Translator


@dataclass(frozen=True)
class TestText:
    """A test set, and how its references are split into words."""

    src: list[str] | None
    ref: list[str]
    origins: list[str] | None = None  # where each line is from
    language: str = ""
    tokenized: bool = False

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


def test_robustness(system: System, test: TestText, say: Callable[[list[str]], list[str]]) -> None:
    """Score what `say` makes of the sources, altered in several ways."""
    words = words_of(test.language, test.tokenized)
    for name, (src, ref) in variants(test.src or [], test.ref, test.language).items():
        found = say(src)
        scores = evaluate(found, ref, test.language, test.tokenized)
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


def training_text(path: Path) -> DataConfig | None:
    """What the run was trained on that a model lies in."""
    run = run_of(path)
    return from_dict(Recipe, read_toml(run / "config.toml"), str(run / "config.toml")).data if run else None


def look_for_leaks(test: TestText, data: DataConfig, reporter: Reporter) -> dict[str, Leaks]:
    """The test lines that stand in the training text, by side."""
    names = [*data.src, *data.tgt, *data.tsv]
    if lost := [name for name in names if not Path(name).exists()]:
        raise TextError(f"the training text {lost[0]} is not here: name it with --train SRC TGT to look for leaks.")
    files = open_pairs(data.src, data.tgt, data.tsv, cache_directory())
    with reporter.bar("looking for leaks", sum(file.src.num_lines for file in files)) as advance:
        found = find_leaks((test.src, test.ref), files, advance)
    return {side: leaks for side, leaks in zip(("src", "ref"), found, strict=True) if leaks}


def warning(leaks: dict[str, Leaks], num_lines: int) -> str:
    """The leaks in a sentence; nothing, if there are none."""
    if not any(one.exact or one.near for one in leaks.values()):
        return ""
    words = {"src": "sources", "ref": "references"}
    counts = "; ".join(
        f"{len(one.exact):,} {words[side]} word for word and {len(one.near):,} nearly" for side, one in leaks.items()
    )
    return f"warning: of {num_lines:,} test lines there stand in the training text {counts} (--json names the lines)."


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


def judge(systems: Sequence[System], test: TestText) -> list[Judgement]:
    """Score the systems; each but the first is compared with the first."""
    how = test.language, test.tokenized
    if len(test.ref) > MOST_RESAMPLED:
        scores = [evaluate(one.hypotheses, test.ref, *how) for one in systems]
    else:
        scores = compare([(one.name, one.hypotheses) for one in systems], test.ref, *how)
    words = words_of(*how)
    lengths = lengths_of(test.ref, words)
    return [
        Judgement(
            one,
            own,
            count_flaws(one.hypotheses, test.ref, words),
            score_parts(one.hypotheses, test.ref, lengths, *how),
            score_parts(one.hypotheses, test.ref, test.origins, *how) if test.origins else [],
            worst_lines(one.hypotheses, test.ref),
        )
        for one, own in zip(systems, scores, strict=True)
    ]


def as_json(judgements: Sequence[Judgement], test: TestText, leaks: dict[str, Leaks] | None) -> str:
    """The report for programs. It holds numbers of lines, from 1, and none of the text: that may not be for all."""

    def scored(scores: Sequence[Score]) -> dict[str, Any]:
        named = {one.name: asdict(one) for one in scores}
        return {name: {k: v for k, v in one.items() if k != "name" and v is not None} for name, one in named.items()}

    def parts(found: Sequence[Part]) -> list[dict[str, Any]]:
        return [{"name": part.name, "lines": part.num_lines, "scores": scored(part.scores)} for part in found]

    systems: list[dict[str, Any]] = []
    for one in judgements:
        systems.append({
            "name": one.system.name,
            "model": one.system.model,
            "scores": scored(one.scores),
            "flaws": asdict(one.flaws),
            "by_length": parts(one.by_length),
            "by_origin": parts(one.by_origin),
            "worst": [{"line": i + 1, "chrF2": chrf} for i, chrf in one.worst],
            "robustness": [
                {"name": name, "scores": scored(scores), "flaws": asdict(flaws)}
                for name, scores, flaws in one.system.robustness
            ],
        })  # fmt: skip
    found = leaks and {
        side: {"exact": [i + 1 for i in one.exact], "near": [i + 1 for i in one.near]} for side, one in leaks.items()
    }
    report = {"diglot": diglot.__version__, "lines": len(test.ref), "language": test.language, "systems": systems}
    return json.dumps({**report, "leaks": found}, ensure_ascii=False)


def as_text(judgements: Sequence[Judgement], test: TestText, leaks: dict[str, Leaks] | None) -> str:
    """The report to read."""
    lines: list[str] = []
    for one in judgements:
        if len(judgements) > 1:
            lines.append(f"{one.system.name}:")
        lines += map(str, one.scores)
    if len(judgements) > 1:
        lines += ["", f"Difference to {judgements[0].system.name}, and how probable one so large is by chance:", ""]
        lines += in_columns(comparison(judgements))
    if leaks is not None:
        lines += ["", warning(leaks, len(test.ref)) or "No test line stands in the training text, exactly or nearly."]
    for one in judgements:
        lines += ["", f"{one.system.name}, {len(test.ref):,} lines", ""]
        header = ("", "LINES", *(score.name for score in one.by_length[0].scores))
        rows = [(part.name, f"{part.num_lines:,}", *values(part.scores)) for part in (*one.by_length, *one.by_origin)]
        lines += in_columns([header, *rows])
        lines += ["", f"no translations: {said(one.flaws)}"]
        if one.system.robustness:
            header = ("", *(score.name for score in one.scores), "NO TRANSLATIONS")
            rows = [(name, *values(scores), said(flaws)) for name, scores, flaws in one.system.robustness]
            lines += ["", *in_columns([header, ("as it is", *values(one.scores), said(one.flaws)), *rows])]
        lines += ["", "The worst lines, by chrF:" if one.worst else "Every line is its reference."]
        for i, chrf in one.worst:
            lines.append(f"  line {i + 1:,}, {chrf:.1f}")
            lines += [f"    source       {test.src[i]}"] if test.src else []
            lines += [f"    translation  {one.system.hypotheses[i]}", f"    reference    {test.ref[i]}"]
    return "\n".join(lines)


def values(scores: Sequence[Score]) -> list[str]:
    """The figures alone."""
    return [f"{score.value:.2f}" for score in scores]


def said(flaws: Flaws) -> str:
    """Flaws in words."""
    return f"{flaws.empty:,} empty, {flaws.loops:,} loops, {flaws.too_long:,} over-long"


def comparison(judgements: Sequence[Judgement]) -> list[tuple[str, ...]]:
    """A row for each score of each system but the first."""
    first = judgements[0].scores
    rows = [("SYSTEM", "SCORE", "DIFFERENCE", "BOOTSTRAP", "RANDOMIZATION")]
    for one in judgements[1:]:
        for score, base in zip(one.scores, first, strict=True):
            chances = (score.p_bootstrap, score.p_randomization)
            shown = ["not tested" if p is None else f"p = {p:.4f}" for p in chances]
            rows.append((one.system.name, score.name, f"{score.value - base.value:+.2f}", *shown))
    return rows
