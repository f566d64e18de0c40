"""Section 5, training: one function that reads top to bottom.

Every random choice is a function of (seed, update, place in the update), so a run can be repeated, and one that was
stopped goes on as if it had not been.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import diglot
from diglot import checkpoint
from diglot.batching import micro_batches, num_updates_of_epoch, pad, updates
from diglot.checkpoint import StoredModel, load_model
from diglot.config import ModelSpec, Recipe
from diglot.corpus import Corpus, PairFile, index_corpus, lines_to_learn_from, open_pairs
from diglot.errors import ConfigError, Interrupted, TextError, TrainingError
from diglot.evaluate import Score, bleu
from diglot.loss import smoothed_loss
from diglot.model import Transformer, padding_mask
from diglot.progress import Reporter
from diglot.run import Log, TrainingState, begin, in_use, restore, save
from diglot.schedule import lrate, make_optimizer
from diglot.subwords import Subwords, learn, load_subwords
from diglot.translator import Translator, choose_device

SKIPS_IN_A_ROW = 10
NUM_SAMPLES = 3  # translations shown at each validation


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


def train(recipe: Recipe, *, changed: frozenset[str] = frozenset(), quiet: bool = False) -> Summary:
    """Train a model as the recipe says, or go on with a run that was stopped.

    `changed` names the keys in which the recipe may differ from the one that the run was begun with.
    """
    reporter = Reporter(quiet)
    run = Path(recipe.train.out)
    with in_use(run, recipe):
        recipe, init = resolve(recipe)
        begin(run, recipe, changed)
        device, bf16 = choose_device(recipe.train.device), choose_precision(recipe.train)
        torch.set_num_threads(recipe.train.threads or os.cpu_count() or 1)
        keep_freed_memory()

        # ---- text
        newest, complaints = checkpoint.newest_step(run)
        for complaint in complaints:
            reporter.say(f"warning: {complaint} Falling back to {newest or 'the beginning'}.")
        resumed = load_model(newest) if newest else None
        files = open_pairs(recipe.data.src, recipe.data.tgt, recipe.data.tsv, run / "text")
        src_subwords, tgt_subwords = get_subwords(recipe, resumed or init, files, reporter)
        corpus, valid = read_corpora(recipe, files, src_subwords, tgt_subwords, run, reporter)
        src_pieces, tgt_pieces = corpus.pairs["src_pieces"], corpus.pairs["tgt_pieces"]
        longest = max(16, int(np.quantile(src_pieces, 0.999, method="higher")))
        search = dataclasses.replace(recipe.search, max_segment=recipe.search.max_segment or longest)
        spec = ModelSpec(recipe.model, recipe.languages, search)

        # ---- network
        torch.manual_seed(recipe.train.seed)
        model = Transformer(recipe.model, src_subwords.num_pieces, tgt_subwords.num_pieces)
        if init:
            checkpoint.put_weights(model, checkpoint.weights_of(init.model))
        model.to(device)
        optimizer = make_optimizer(model)
        state = TrainingState(corpus=corpus.fingerprint())
        if resumed and newest:
            state = restore(newest, resumed, model, optimizer, state.corpus)
        stored = StoredModel(run, spec, model, src_subwords, tgt_subwords)
        say_what_begins(reporter, recipe, corpus, valid, model, state, device, bf16)

        # ---- updates
        goal = recipe.train.max_updates
        begun, meter = time.monotonic() - state.seconds, Meter()
        with (
            signals() as caught,
            Log(run, state.update, recipe.train.tensorboard) as log,
            reporter.bar("update", goal, state.update) as advance,
        ):
            for rows in remaining_updates(corpus, recipe, state):
                if is_over(state, recipe):
                    break
                rate = lrate(state.update + 1, recipe.model.d_model, recipe.train.warmup_steps,
                             recipe.train.learning_rate_scale)  # fmt: skip
                num_pieces = int(tgt_pieces[rows].sum())  # of all micro-batches: the loss is exact, no mean of means
                sum_loss, sum_nll = 0.0, 0.0
                model.train()
                for place, micro in enumerate(micro_batches(rows, src_pieces, tgt_pieces, recipe.data.micro_batch)):
                    torch.manual_seed(mix(recipe.train.seed, state.update, place))
                    src, src_mask, tgt, tgt_mask = collate(corpus, micro, src_subwords, tgt_subwords, device)
                    with torch.autocast(device, torch.bfloat16, enabled=bf16):
                        hidden = model(src, src_mask, tgt)
                        loss, nll = smoothed_loss(hidden[tgt_mask], model.output.weight, model.output.bias,
                                                  tgt[tgt_mask], recipe.train.label_smoothing)  # fmt: skip
                    (loss / num_pieces).backward()
                    sum_loss, sum_nll = sum_loss + loss.item(), sum_nll + nll.item()
                norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.clip_norm or math.inf))
                if math.isfinite(sum_loss) and math.isfinite(norm):
                    for group in optimizer.param_groups:
                        group["lr"] = rate
                    optimizer.step()
                    state.skipped_in_a_row = 0
                else:
                    skip(state, reporter, sum_loss, norm)
                optimizer.zero_grad()

                state.update += 1
                state.update_of_epoch += 1
                state.pieces += num_pieces
                state.seconds = time.monotonic() - begun
                meter.add(sum_loss, sum_nll, num_pieces)
                advance(1, f"loss {meter.loss:.3f}  {meter.speed:,.0f} pieces/s  epoch {state.epoch + 1}")
                if due(state.update, recipe.train.log_every, goal):
                    log.write(state.update, epoch=state.epoch + 1, loss=meter.loss, nll=meter.nll, rate=rate, norm=norm,
                              pieces_per_second=meter.speed, pieces=state.pieces, skipped=state.skipped)  # fmt: skip
                    meter = Meter()
                if due(state.update, recipe.train.valid_every, goal):
                    validate_and_save(stored, optimizer, state, valid, device, log, reporter, recipe.train.average)
                    meter = Meter()
                elif caught:
                    save(run, stored, optimizer, state, recipe.train.average)
                if caught:
                    raise Interrupted(caught[0], f"stopped after update {state.update:,}; all is saved. "
                                      f"To go on: diglot train {run}")  # fmt: skip
            if state.update not in state.validated:  # stopped before, and asked to go no further
                validate_and_save(stored, optimizer, state, valid, device, log, reporter, recipe.train.average)
        return finish(run, stored, state, valid, device, reporter, recipe, len(corpus))


# ------------------------------------------------------------------- before the first update


def resolve(recipe: Recipe) -> tuple[Recipe, StoredModel | None]:
    """Check what only files can tell; with train.init, its network and languages become the recipe's."""
    data = recipe.data
    if not data.src and not data.tsv:
        raise ConfigError("nothing to train on: give --src and --tgt files, or --tsv (data.src, data.tgt, data.tsv).")
    if not recipe.train.init:
        return recipe, None
    init = load_model(Path(recipe.train.init))
    own = {name: getattr(recipe.model, name) for name in ("dropout", "attention_dropout", "ffn_dropout")}
    model = dataclasses.replace(init.spec.model, **own)
    languages = dataclasses.replace(
        recipe.languages,
        src=recipe.languages.src or init.spec.languages.src,
        tgt=recipe.languages.tgt or init.spec.languages.tgt,
    )
    joint = init.src_subwords == init.tgt_subwords
    subwords = dataclasses.replace(recipe.subwords, joint=joint, model="", src_model="", tgt_model="")
    return dataclasses.replace(recipe, model=model, languages=languages, subwords=subwords), init


def choose_precision(config: Any) -> bool:
    """Whether matrix products are done in bf16: where the processor has instructions for it, if left to us."""
    if config.precision != "auto":
        return config.precision == "bf16"
    if choose_device(config.device) == "cuda":
        return torch.cuda.is_bf16_supported()
    capabilities = torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]
    return capabilities[1]


def keep_freed_memory() -> None:
    """Let glibc keep freed tensors for the next step: returning them to the system and faulting them in again costs
    more than half of the time of a step."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def get_subwords(
    recipe: Recipe, start: StoredModel | None, files: list[PairFile], reporter: Reporter
) -> tuple[Subwords, Subwords]:
    """The subwords of the model that is gone on from, or given, or learnt from the corpora."""
    config = recipe.subwords
    if start:
        return start.src_subwords, start.tgt_subwords
    if config.model:
        return (subwords := load_subwords(Path(config.model))), subwords
    if config.src_model:
        return load_subwords(Path(config.src_model)), load_subwords(Path(config.tgt_model))
    if not any(file.src.num_lines for file in files):
        raise TextError(f"{files[0].src.path} is empty: there is nothing to train on.")
    with reporter.bar("learning subwords", None):
        if config.joint:
            joint = learn(lines_to_learn_from(files, True, True), config.size, config.type)
            learnt = joint, joint
        else:
            learnt = (
                learn(lines_to_learn_from(files, True, False), config.size, config.type),
                learn(lines_to_learn_from(files, False, True), config.size, config.type),
            )
    for subwords in dict.fromkeys(learnt):
        if subwords.num_pieces < config.size:
            reporter.say(f"The text holds {subwords.num_pieces:,} subwords, fewer than the {config.size:,} asked for.")
    return learnt


def read_corpora(
    recipe: Recipe,
    files: list[PairFile],
    src_subwords: Subwords,
    tgt_subwords: Subwords,
    run: Path,
    reporter: Reporter,
) -> tuple[Corpus, tuple[list[str], list[str]]]:
    """The pairs to train on and the text to validate on; what is dropped is counted, and listed in dropped.tsv."""
    data = recipe.data
    num_lines = sum(file.src.num_lines for file in files)
    with (
        (run / "dropped.tsv").open("w", encoding="utf-8") as drops,
        reporter.bar("reading pairs", num_lines) as advance,
    ):
        corpus = index_corpus(files, src_subwords, tgt_subwords, data, drops, lambda n: advance(n, ""))
        if data.valid_src or data.valid_tsv:
            src: list[str] = []
            tgt: list[str] = []
            for file in open_pairs(data.valid_src, data.valid_tgt, data.valid_tsv):
                for a, b, c, d in file.spans():
                    src.append(file.src.data[a:b].decode())
                    tgt.append(file.tgt.data[c:d].decode())
            valid = src, tgt
            if not src:
                raise TextError(f"{(*data.valid_src, *data.valid_tsv)[0]} is empty: there is nothing to validate on.")
        else:
            num = min(data.held_out, len(corpus) // 10)
            valid = corpus.hold_out(num, recipe.train.seed, drops)
            reporter.say(f"No validation text is given: {len(valid[0]):,} pairs are held out of training.")
    if corpus.dropped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in corpus.dropped.most_common())
        reporter.say(f"Of {num_lines:,} pairs {reasons}; see {run / 'dropped.tsv'}.")
    if not len(corpus) or not valid[0]:
        raise TextError(
            f"of {num_lines:,} pairs {len(corpus):,} are left to train on and {len(valid[0]):,} to validate on: "
            f"too few. {run / 'dropped.tsv'} lists the others with the reason."
        )
    return corpus, valid


def say_what_begins(
    reporter: Reporter,
    recipe: Recipe,
    corpus: Corpus,
    valid: tuple[list[str], list[str]],
    model: Transformer,
    state: TrainingState,
    device: str,
    bf16: bool,
) -> None:
    """One paragraph on what is about to run."""
    num = sum(p.numel() for p in model.parameters())
    epoch = num_updates_of_epoch(corpus.pairs["tgt_pieces"], recipe.train.update_pieces)
    doing = f"Going on after update {state.update:,}" if state.update else "Training"
    reporter.say(
        f"{doing}: {len(corpus):,} pairs, {len(valid[0]):,} to validate on; {num / 1e6:.2f} M parameters on {device} "
        f"in {'bf16' if bf16 else 'fp32'}; {recipe.train.max_updates:,} updates at most, {epoch:,} an epoch."
    )


# ------------------------------------------------------------------- during


def remaining_updates(corpus: Corpus, recipe: Recipe, state: TrainingState) -> Iterator[NDArray[np.int64]]:
    """The rows of each update from where the state stands, epoch after epoch."""
    src_pieces, tgt_pieces = corpus.pairs["src_pieces"], corpus.pairs["tgt_pieces"]
    while True:
        epoch = updates(src_pieces, tgt_pieces, recipe.train.update_pieces, recipe.train.seed, state.epoch)
        for i, rows in enumerate(epoch):
            if i >= state.update_of_epoch:
                yield rows
        state.epoch, state.update_of_epoch = state.epoch + 1, 0


def is_over(state: TrainingState, recipe: Recipe) -> bool:
    """Whether training ends here."""
    return state.update >= recipe.train.max_updates or 0 < recipe.train.patience <= state.stale


def due(update: int, every: int, goal: int) -> bool:
    """Whether something that happens every so many updates, and after the last, happens now."""
    return update % every == 0 or update == goal


def mix(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def collate(
    corpus: Corpus, rows: NDArray[np.int64], src_subwords: Subwords, tgt_subwords: Subwords, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A micro-batch: pieces and masks of both sides."""
    src_texts, tgt_texts = corpus.texts(rows)
    src, src_lengths = pad([[*s, src_subwords.eos_id] for s in src_subwords.encode_all(src_texts)], src_subwords.pad_id)
    tgt, tgt_lengths = pad([[*t, tgt_subwords.eos_id] for t in tgt_subwords.encode_all(tgt_texts)], tgt_subwords.pad_id)
    tensors = src, padding_mask(src_lengths, src.size(1)), tgt, padding_mask(tgt_lengths, tgt.size(1))
    src, src_mask, tgt, tgt_mask = (tensor.to(device, non_blocking=True) for tensor in tensors)
    return src, src_mask, tgt, tgt_mask


def skip(state: TrainingState, reporter: Reporter, loss: float, norm: float) -> None:
    """Leave an update out whose loss or gradient is no number; too many in a row end the run."""
    state.skipped += 1
    state.skipped_in_a_row += 1
    reporter.say(f"update {state.update + 1:,} is skipped: its loss is {loss}, the norm of its gradient {norm}.")
    if state.skipped_in_a_row >= SKIPS_IN_A_ROW:
        raise TrainingError(
            f"{SKIPS_IN_A_ROW} updates in a row, up to {state.update + 1:,}, had no finite gradient: "
            "training has diverged. Lower train.learning_rate_scale, raise train.warmup_steps or set train.clip_norm=1."
        )


class Meter:
    """Loss and speed since the last line of the log."""

    def __init__(self) -> None:
        self.sum_loss, self.sum_nll, self.pieces, self.begun = 0.0, 0.0, 0, time.monotonic()

    def add(self, loss: float, nll: float, pieces: int) -> None:
        """Count an update."""
        self.sum_loss, self.sum_nll, self.pieces = (
            self.sum_loss + loss,
            self.sum_nll + nll,
            self.pieces + pieces,
        )

    @property
    def loss(self) -> float:
        """Smoothed loss of a target piece, in nats."""
        return self.sum_loss / max(1, self.pieces)

    @property
    def nll(self) -> float:
        """The same without smoothing."""
        return self.sum_nll / max(1, self.pieces)

    @property
    def speed(self) -> float:
        """Target pieces a second."""
        return self.pieces / max(1e-9, time.monotonic() - self.begun)


@contextmanager
def signals() -> Generator[list[int]]:
    """Collect SIGINT and SIGTERM, to be obeyed between two updates; a second one is obeyed at once."""
    caught: list[int] = []

    def remember(number: int, frame: Any) -> None:
        caught.append(number)
        for each in old:
            signal.signal(each, signal.SIG_DFL)

    old: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, remember)
    except ValueError:  # not in the main thread: whoever runs us there handles signals
        old.clear()
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def validate(stored: StoredModel, valid: tuple[list[str], list[str]], device: str, method: str) -> dict[str, Any]:
    """Perplexity and BLEU on the validation text, and a few translations."""
    src, tgt = valid
    translator = Translator([stored], device=device)
    scored = translator.score(src, tgt)
    nll = -sum(one.log_prob for one in scored) / sum(one.num_pieces for one in scored)
    found = [one.text for one in translator.translate(src, method=method, num_best=1)]
    score = bleu(found, tgt, stored.spec.languages.tgt)
    samples = [{"src": src[i], "ref": tgt[i], "out": found[i]} for i in range(min(NUM_SAMPLES, len(src)))]
    return {
        "nll": nll,
        "ppl": math.exp(min(nll, 700)),
        "bleu": score.value,
        "signature": score.signature,
        "samples": samples,
    }


def validate_and_save(
    stored: StoredModel,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    valid: tuple[list[str], list[str]],
    device: str,
    log: Log,
    reporter: Reporter,
    average: int,
) -> None:
    """A checkpoint that may be averaged or become the best."""
    scores = validate(stored, valid, device, method="greedy")
    judge(state, scores)
    log.write(state.update, seconds=state.seconds, **{f"valid_{key}": value for key, value in scores.items()})
    show(reporter, state, scores)
    save(stored.path, stored, optimizer, state, average)


def judge(state: TrainingState, scores: dict[str, Any]) -> None:
    """Keep account of the best."""
    state.validated.append(state.update)
    if scores["bleu"] > state.best_bleu:
        state.best_bleu, state.best_update, state.stale = scores["bleu"], state.update, 0
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
    run: Path,
    stored: StoredModel,
    state: TrainingState,
    valid: tuple[list[str], list[str]],
    device: str,
    reporter: Reporter,
    recipe: Recipe,
    num_pairs: int,
) -> Summary:
    """6.1: average the last checkpoints; score the last, the best and the averaged; write the final model."""
    steps = [checkpoint.step_path(run, update) for update in state.validated[-recipe.train.average :]]
    best = checkpoint.step_path(run, state.best_update)
    averaged = checkpoint.average_weights(steps)
    candidates: list[tuple[str, Callable[[], dict[str, Tensor]]]] = [
        (f"last (update {state.update:,})", lambda: checkpoint.read_tensors(steps[-1] / checkpoint.WEIGHTS)),
        (f"best (update {state.best_update:,})", lambda: checkpoint.read_tensors(best / checkpoint.WEIGHTS)),
        (f"average of the last {len(steps)}", lambda: averaged),
    ]
    scores: dict[str, dict[str, Any]] = {}
    with reporter.bar("scoring the final models", len(candidates)) as advance:
        for name, weights in candidates:
            checkpoint.put_weights(stored.model, weights())
            scores[name] = validate(stored, valid, device, method=stored.spec.search.method)
            advance(1, "")
    final = scores[candidates[-1][0]]
    score = Score("BLEU", final["bleu"], final["signature"])
    card = model_card(stored, recipe, num_pairs, state, len(steps), score, final["ppl"])
    files = checkpoint.model_files(stored.spec, averaged, stored.src_subwords, stored.tgt_subwords, card)
    checkpoint.write_directory(run / "model", files)
    reporter.table(
        f"Validation ({len(valid[0]):,} lines, {stored.spec.search.method}; {final['signature']})",
        ("model", "perplexity", "BLEU"),
        [(name, f"{one['ppl']:.2f}", f"{one['bleu']:.2f}") for name, one in scores.items()],
    )
    why = "no better BLEU for a while" if 0 < recipe.train.patience <= state.stale else "all updates done"
    skipped = f" {state.skipped:,} updates were skipped." if state.skipped else ""
    reporter.say(
        f"Ended after {state.update:,} updates, {state.epoch + 1:,} epochs, {state.seconds / 60:.1f} min: "
        f"{why}.{skipped}"
    )
    reporter.say(f"The model is {run / 'model'}. To use it:\n  diglot translate {run / 'model'} FILE")
    num_parameters = sum(p.numel() for p in stored.model.parameters())
    return Summary(run / "model", state.update, state.epoch + 1, state.seconds, state.skipped, num_parameters, scores)


def model_card(
    stored: StoredModel,
    recipe: Recipe,
    num_pairs: int,
    state: TrainingState,
    num_averaged: int,
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
| training | {updates_done}; mean of the last {num_averaged} checkpoints |
| validation | perplexity {ppl:.2f}, {score} |
| licence | {licence} |
"""
