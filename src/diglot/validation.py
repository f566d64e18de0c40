"""What a model is worth while it trains and at the end: perplexity and BLEU on the validation text, the final model."""

from __future__ import annotations

import dataclasses
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import diglot
from diglot import checkpoint
from diglot.alignment import choose_heads_by
from diglot.attend import write_frame
from diglot.checkpoint import StoredModel
from diglot.config import AlignmentConfig, Recipe
from diglot.errors import CheckpointError, ConfigError, Interrupted
from diglot.evaluate import Score, bleu
from diglot.parallel import is_out_of_memory
from diglot.progress import Reporter
from diglot.run import Job, Log, TrainingState
from diglot.signals import Signals
from diglot.translator import Translator

NUM_SAMPLES = 3  # translations shown at each validation
FEWEST = 20  # pairs, by which heads are chosen that align words
LINES_AT_ONCE = 64  # of the validation text


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    model: Path
    updates: int
    epochs: int
    seconds: float
    skipped: int
    parameters: int
    scores: dict[str, dict[str, Any]]  # of the last, best and averaged model on the validation text


@dataclass(frozen=True)
class ValidationText:
    """Lines and their translations, and the target language of each where the model has several."""

    src: list[str]
    tgt: list[str]
    to: list[str]


def validate(
    job: Job, stored: StoredModel, valid: ValidationText, method: str, signals: Signals
) -> dict[str, Any] | None:
    """Perplexity and BLEU on the validation text, and a few translations; each rank does its share. None, if a signal
    was caught before the end."""
    world, translator = job.world, Translator([stored], device=job.device)
    own = sorted(range(len(valid.src)), key=lambda i: len(valid.src[i]))[world.rank :: world.size]
    share: list[tuple[int, float, int, str]] | None = []
    try:
        with signals.at_once(), job.reporter.bar("validation", len(own)) as advance:
            for start in range(0, len(own), LINES_AT_ONCE):
                part = own[start : start + LINES_AT_ONCE]
                share += validate_lines(translator, valid, part, method)
                advance(len(part), "")
    except Interrupted:
        share = None
    world.wait_for_all()  # their shares may take longer than a rank may take to answer
    shares = world.gather(share)
    if any(share is None for share in shares):
        return None
    each = sorted(line for share in shares for line in share)
    nll = -sum(log_prob for _, log_prob, _, _ in each) / sum(num_pieces for _, _, num_pieces, _ in each)
    texts = [text for *_, text in each]
    score = bleu(texts, valid.tgt, stored.spec.languages.tgt)
    samples = [{"src": src, "ref": ref, "out": out} for src, ref, out in zip(valid.src, valid.tgt, texts, strict=True)]
    return {
        "nll": nll,
        "ppl": math.exp(min(nll, 700)),
        "bleu": score.value,
        "signature": score.signature,
        "samples": samples[:NUM_SAMPLES],
    }


def validate_lines(
    translator: Translator, valid: ValidationText, lines: list[int], method: str
) -> list[tuple[int, float, int, str]]:
    """Number, log-probability, pieces and translation of some lines; if memory runs out, of half of them at a time:
    what becomes of a line does not depend on those beside it."""
    src, tgt = ([side[i] for i in lines] for side in (valid.src, valid.tgt))
    to = [valid.to[i] for i in lines] if valid.to else None
    try:
        scored = translator.score(src, tgt, to=to)
        found = translator.translate(src, method=method, num_best=1, to=to)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or len(lines) == 1:
            raise
    else:
        return [(i, one.log_prob, one.num_pieces, two.text) for i, one, two in zip(lines, scored, found, strict=True)]
    middle = len(lines) // 2
    halves = lines[:middle], lines[middle:]
    return [line for half in halves for line in validate_lines(translator, valid, half, method)]


def check_watched(recipe: Recipe, valid: ValidationText) -> None:
    """Refuse to watch a line that is not there, before anything is trained."""
    if recipe.train.watch > len(valid.src):
        raise ConfigError(
            f"train.watch = {recipe.train.watch} is beyond the {len(valid.src):,} lines of the validation text."
        )


def watch(job: Job, stored: StoredModel, valid: ValidationText, update: int) -> None:
    """Keep what the network looks at in the watched line and its translation, as one picture of a film."""
    line = job.recipe.train.watch - 1
    if line >= 0 and job.world.is_first:
        translator, to = Translator([stored], device=job.device), valid.to[line] if valid.to else None
        (attention,) = translator.attend(valid.src[line], valid.tgt[line], to=to, attribution=False)
        write_frame(job.run, update, attention)


def judge(state: TrainingState, scores: dict[str, Any]) -> None:
    """Keep account of the best: by BLEU, and where that is equal, as it is while it is still 0, by the likelihood."""
    state.validated.append(state.update)
    if (scores["bleu"], -scores["nll"]) > (state.best_bleu, -state.best_nll):
        state.best_bleu, state.best_nll, state.best_update = scores["bleu"], scores["nll"], state.update
        state.stale = 0
    else:
        state.stale += 1


def show(reporter: Reporter, state: TrainingState, scores: dict[str, Any]) -> None:
    """A validation, for whoever watches."""
    mark = " *" if state.best_update == state.update else ""
    reporter.say(
        f"update {state.update:,}  {state.seconds / 60:.1f} min  validation: perplexity {scores['ppl']:.2f}, "
        f"BLEU {scores['bleu']:.2f}{mark}"
    )
    for sample in scores["samples"]:
        reporter.say(f"    {sample['src']}\n  → {sample['out']}")


# ------------------------------------------------------------------- after the last update


def finish(
    job: Job,
    stored: StoredModel,
    state: TrainingState,
    valid: ValidationText,
    num_pairs: int,
    log: Log,
    signals: Signals,
) -> Summary | None:
    """6.1: average the last checkpoints. The last, the best and the average are scored, and the winner is the model.
    None, if a signal was caught before the end."""
    run, reporter = job.run, job.reporter
    try:
        with signals.at_once():
            own = whole_steps(job, state)
    except Interrupted:
        own = None
    seen = job.world.gather(own)
    if None in seen:
        return None
    steps = sorted(set[int](seen[0]).intersection(*seen))  # a network file system may show some of them late
    try:
        with signals.at_once():
            candidates = read_candidates(job, stored, state, steps)
    except Interrupted:
        candidates = {}
    if not all(job.world.gather(len(candidates))):
        return None
    scores: dict[str, dict[str, Any]] = {}
    for name, weights in candidates.items():
        checkpoint.put_weights(stored.model, weights)
        found = validate(job, stored, valid, stored.spec.search.method, signals)
        if not found:
            return None
        scores[name] = found
    chosen = max(scores, key=lambda name: scores[name]["bleu"])  # the average, if they are equal
    final = scores[chosen]
    checkpoint.put_weights(stored.model, candidates[chosen])
    spec = dataclasses.replace(stored.spec, alignment=choose_alignment(job, stored, valid))
    score = Score("BLEU", final["bleu"], final["signature"])
    card = model_card(stored, job.recipe, num_pairs, state, chosen, score, final["ppl"])
    files = checkpoint.model_files(spec, candidates[chosen], stored.src_subwords, stored.tgt_subwords, card)
    if job.world.is_first:
        checkpoint.write_directory(run / "model", files)
        log.write(state.update, final=chosen, final_ppl=final["ppl"], final_bleu=final["bleu"])
    reporter.table(
        f"Validation ({len(valid.src):,} lines, {stored.spec.search.method}; {final['signature']})",
        ("model", "perplexity", "BLEU"),
        [
            (f"{name} *" if name == chosen else name, f"{one['ppl']:.2f}", f"{one['bleu']:.2f}")
            for name, one in scores.items()
        ],
    )
    why = "no better BLEU for a while" if 0 < job.recipe.train.patience <= state.stale else "all updates done"
    skipped = f" {state.skipped:,} updates were skipped." if state.skipped else ""
    reporter.say(
        f"Ended after update {state.update:,}, in epoch {state.epoch + 1:,}, {state.seconds / 60:.1f} min: "
        f"{why}.{skipped}"
    )
    model = shlex.quote(str(run / "model"))
    reporter.say(f"The model is {model}: the {chosen}. To use it:\n  diglot translate {model} FILE")
    num_parameters = sum(p.numel() for p in stored.model.parameters())
    return Summary(run / "model", state.update, state.epoch + 1, state.seconds, state.skipped, num_parameters, scores)


def choose_alignment(job: Job, stored: StoredModel, valid: ValidationText) -> AlignmentConfig:
    """The heads that tell which words stand for each other; no text is too little to end a training on."""
    if not job.world.is_first or len(valid.src) < FEWEST:
        return AlignmentConfig()
    translator = Translator([stored], device=job.device)
    return choose_heads_by(translator, list(zip(valid.src, valid.tgt, strict=True)), to=valid.to or None)


def whole_steps(job: Job, state: TrainingState) -> list[int]:
    """The updates whose checkpoints may come to be the final model; broken ones are passed over, and named."""
    whole: list[int] = []
    for update in sorted({*state.validated[-job.recipe.train.average :], state.best_update}):
        try:
            checkpoint.check_directory(checkpoint.step_path(job.run, update))
            whole.append(update)
        except CheckpointError as error:
            job.reporter.say(f"warning: {error} It is left out of the final model.")
    return whole


def read_candidates(
    job: Job, stored: StoredModel, state: TrainingState, whole: list[int]
) -> dict[str, dict[str, Tensor]]:
    """The weights that may become the final model, by what they are, out of checkpoints that are whole."""
    candidates: dict[str, dict[str, Tensor]] = {}
    last = [update for update in state.validated[-job.recipe.train.average :] if update in whole]
    if last:
        steps = [checkpoint.step_path(job.run, update) for update in last]
        candidates[f"average of the last {len(steps)}"] = checkpoint.average_weights(steps)
    if state.best_update in whole:
        best = checkpoint.step_path(job.run, state.best_update)
        candidates[f"best (update {state.best_update:,})"] = checkpoint.read_tensors(best / checkpoint.WEIGHTS)
    in_memory = {name: weight.clone() for name, weight in checkpoint.weights_of(stored.model).items()}
    return {**candidates, f"last (update {state.update:,})": in_memory}


def model_card(
    stored: StoredModel,
    recipe: Recipe,
    num_pairs: int,
    state: TrainingState,
    chosen: str,
    score: Score,
    ppl: float,
) -> str:
    """README.md of a model directory."""
    languages, data = stored.spec.languages, recipe.data
    pair = f"{languages.src or 'source'} to {languages.tgt or 'target'}"
    names = ", ".join(Path(name).name for name in (*data.src, *data.tgt, *data.tsv))
    size = f"{sum(p.numel() for p in stored.model.parameters()):,} parameters"
    updates_done = f"{state.update:,} updates of about {recipe.train.update_pieces:,} target pieces"
    licence = "not stated: it follows from the licence of the data; whoever passes this model on should write it here"
    return f"""# Translation model: {pair}

A Transformer (Vaswani et al., 2017), trained with diglot {diglot.__version__}.

    pip install diglot
    diglot translate PATH_OF_THIS_DIRECTORY FILE

| | |
|---|---|
| languages | {pair} |
| size | {size} |
| data | {num_pairs:,} sentence pairs: {names} |
| training | {updates_done}; {chosen} |
| validation | perplexity {ppl:.2f}, {score} |
| licence | {licence} |
"""
