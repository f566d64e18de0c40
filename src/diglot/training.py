"""Section 5, training: one function that reads top to bottom, the same on one rank and on many.

Every random choice is a function of (seed, update, sample), so a run can be repeated, and one that was stopped goes on
as if it had not been.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import math
import os
import shlex
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from diglot import checkpoint
from diglot.batching import num_updates_of, pieces_of_epoch
from diglot.checkpoint import StoredModel, load_model
from diglot.config import ModelSpec, Recipe
from diglot.corpus import Corpus
from diglot.errors import CheckpointError, Interrupted, TrainingError
from diglot.loader import (
    IDLE,
    Place,
    Update,
    UpdateReader,
    give_back_freed_memory,
    naming_a_killed_worker,
    read_updates,
)
from diglot.loss import smoothed_loss
from diglot.memory import choose_micro_batch
from diglot.model import Transformer
from diglot.packed import PackedTransformer, why_not
from diglot.parallel import is_out_of_memory, is_shared_out, join, num_cores, parallelize, sync_gradients, whole
from diglot.progress import Reporter
from diglot.run import (
    SKIPPED,
    Job,
    Log,
    TrainingState,
    check_same_recipe,
    in_use,
    read_state,
    resolve,
    restore,
    save,
    see_alike,
    write_recipe,
)
from diglot.schedule import lrate, make_optimizer
from diglot.signals import Signals
from diglot.texts import Texts, check_alike, read_texts
from diglot.translator import choose_device
from diglot.validation import Summary, ValidationText, check_watched, finish, judge, show, validate, watch

SKIPS_IN_A_ROW = 10
LONGEST_SHARE = 0.999  # of the sources are at most as long as what is translated at once
WORKERS_OF_A_GPU = 4  # processes that read ahead; beside a CPU one is plenty
NOTHING_TO_SAVE = "stopped before an update was made: there was nothing to save. To go on, repeat the command."


def train(recipe: Recipe, *, changed: frozenset[str] = frozenset(), quiet: bool = False) -> Summary:
    """Train a model as the recipe says, or go on with a run that was stopped.

    `changed` names the keys in which the recipe may differ from the one that the run was begun with.
    """
    run, device = Path(recipe.train.out), choose_device(recipe.train.device)
    with (
        naming_want_of_memory(run),
        join(device, recipe.train.rank_timeout) as world,
        in_use(run, recipe) if world.is_first else nullcontext(),
        Signals(NOTHING_TO_SAVE if world.is_first else "") as signals,
    ):
        reporter = Reporter(quiet or not world.is_first)
        if world.is_first:
            checkpoint.sweep(run)  # before anybody looks: it puts back what a replacement had moved
        world.wait_for_all()
        recipe, init = resolve(recipe, changed)
        job = Job(recipe, run, world, device, recipe.train.precision == "bf16", reporter)
        check_same_recipe(job)
        torch.set_num_threads(recipe.train.threads or max(1, num_cores() // world.local_size))
        keep_freed_memory()
        repeat_exactly(device)

        # ---- text
        resumed = find_resumed(job)
        job = dataclasses.replace(job, bf16=choose_precision(job, resumed))
        with world.first_goes_ahead():
            texts = read_texts(job, resumed or init)
        check_alike(texts, world)
        check_watched(recipe, texts.valid)
        counts = texts.corpus.count_lengths()[0].cumsum()
        longest = max(16, int(np.searchsorted(counts, LONGEST_SHARE * len(texts.corpus))))
        search = dataclasses.replace(recipe.search, max_segment=recipe.search.max_segment or longest)
        spec = ModelSpec(recipe.model, recipe.languages, search)

        # ---- network
        torch.manual_seed(recipe.train.seed)
        model = Transformer(recipe.model, texts.src_subwords.num_pieces, texts.tgt_subwords.num_pieces)
        if start := resumed or init:
            checkpoint.put_weights(model, checkpoint.weights_of(start.model))
        stored = StoredModel(run, spec, model, texts.src_subwords, texts.tgt_subwords)
        network = parallelize(in_training(model.to(device), job), world, recipe.train.strategy, device)
        optimizer = make_optimizer(model)
        state = TrainingState(corpus=texts.corpus.fingerprint())
        if resumed:
            state = restore(resumed.path, model, optimizer, state.corpus)
        state.bf16 = job.bf16
        reader = UpdateReader(texts, recipe, world)
        if not state.micro_batch or "data.micro_batch" in changed:
            state.micro_batch = choose_micro_batch(job, network, model, reader)
        reader.micro_batch = state.micro_batch
        write_recipe(job)
        say_what_begins(job, texts, model, state)

        # ---- updates
        goal, every, log_every = recipe.train.max_updates, recipe.train.valid_every, recipe.train.log_every
        begun, meter = time.monotonic() - state.seconds, Meter(state.since_log)
        with (
            signals.put_off(),
            naming_a_killed_worker(),
            Log(run, state.update, recipe.train.tensorboard, world.is_first) as log,
            reporter.bar("update", goal, state.update) as advance,
        ):
            if state.update and due(state.update, every, goal) and state.update not in state.validated:
                validate_and_save(job, stored, optimizer, state, texts.valid, log, signals)  # stopped just before
            for update in read_updates(reader, state, 1 if device == "cpu" else WORKERS_OF_A_GPU):
                if is_over(state, recipe):
                    break
                rate = lrate(state.update + 1, recipe.model.d_model, recipe.train.warmup_steps,
                             recipe.train.learning_rate_scale)  # fmt: skip
                sums = gradients_in_memory(job, network, model, reader, update, state)
                bound = recipe.train.clip_norm or math.inf
                norm = float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), bound)))
                if is_finite := math.isfinite(sums.loss) and math.isfinite(norm):
                    for group in optimizer.param_groups:
                        group["lr"] = rate
                    optimizer.step()
                optimizer.zero_grad()
                count(job, state, texts.corpus, update.place, sums, norm, is_finite)
                state.seconds = time.monotonic() - begun
                stop = max(world.gather(signals.caught > 0))  # all ranks end together
                meter.add(sums)
                advance(1, f"loss {meter.loss:.3f}  {meter.speed:,.0f} pieces/s  epoch {state.epoch + 1}")
                if due(state.update, log_every, goal):
                    log.write(state.update, epoch=state.epoch + 1, loss=meter.loss, nll=meter.nll, rate=rate, norm=norm,
                              pieces_per_second=meter.speed, pieces=state.pieces, skipped=state.skipped,
                              memory_splits=state.memory_splits)  # fmt: skip
                    meter.reset()
                if due(state.update, every, goal):
                    validate_and_save(job, stored, optimizer, state, texts.valid, log, signals)
                    meter.restart()
                elif stop:
                    save(job, stored, optimizer, state)
                    raise stopped(job, state, log, signals)
            if state.update not in state.validated:  # stopped before, and asked to go no further
                validate_and_save(job, stored, optimizer, state, texts.valid, log, signals)
            if summary := finish(job, plain_copy(stored), state, texts.valid, len(texts.corpus), log, signals):
                return summary
            raise stopped(job, state, log, signals)


# ------------------------------------------------------------------- before the first update


def choose_precision(job: Job, resumed: StoredModel | None) -> bool:
    """Whether matrix products are done in bf16: if left to us, where they are faster, and for all of a run alike."""
    if job.recipe.train.precision != "auto":
        return job.bf16
    if resumed and (begun_with := read_state(resumed.path).bf16) is not None:
        return begun_with
    if job.device == "cuda":
        return all(job.world.gather(torch.cuda.is_bf16_supported()))
    is_faster = seconds_of_a_product(torch.bfloat16) < 0.8 * seconds_of_a_product(torch.float32)
    return all(job.world.gather(is_faster))


def seconds_of_a_product(dtype: torch.dtype) -> float:
    """The least of a few tries, which is what a processor without instructions for bf16 is told by: there it takes
    several times as long."""
    a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    times: list[float] = []
    for _ in range(8):
        begun = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - begun)
    return min(times)


def in_training(model: Transformer, job: Job) -> nn.Module:
    """The network as it is trained: on a CPU in packed rows, where that can be done."""
    if job.device != "cpu":
        return model
    if job.world.size > 1 and job.recipe.train.strategy == "fsdp":  # which wants to call each layer itself
        return model
    if why := why_not(model.config):
        job.reporter.say(
            "warning: without the native kernels training takes two to three times as long, and twice the memory: "
            f"{why}."
        )
        return model
    return PackedTransformer(model, torch.bfloat16 if job.bf16 else torch.float32)


def keep_freed_memory() -> None:
    """Let glibc keep freed tensors for the next step: returning them to the system and faulting them in again costs
    more than half of the time of a step."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def repeat_exactly(device: str) -> None:
    """Have a GPU add up in the same order each time; a kernel that cannot is named in a warning."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def find_resumed(job: Job) -> StoredModel | None:
    """The newest whole checkpoint of the run; broken ones above it are set aside, and that is said. If all are broken,
    nothing is begun over them."""
    newest, complaints = see_alike(  # all look before anything is moved
        job, lambda: checkpoint.newest_step(job.run), lambda found: found[0] and found[0].name
    )
    if complaints and not newest:
        raise CheckpointError(
            f"no checkpoint of {job.run} is whole: {complaints[0]} Nothing was begun anew over them: give back a copy, "
            "or begin a new run with another --out."
        )
    for complaint in complaints:
        job.reporter.say(f"warning: {complaint} Falling back to {newest}.")
    if job.world.is_first:
        checkpoint.set_aside(job.run, newest)
    return load_model(newest) if newest else None


def say_what_begins(job: Job, texts: Texts, model: Transformer, state: TrainingState) -> None:
    """One paragraph on what is about to run."""
    num = sum(p.numel() for p in model.parameters())
    groups = texts.corpus.groups(job.recipe.data)
    pieces = pieces_of_epoch(texts.corpus.lengths, groups, job.recipe.train.seed, state.epoch)
    epoch = num_updates_of(pieces, job.recipe.train.update_pieces)
    doing = f"Going on after update {state.update:,}" if state.update else "Training"
    if job.recipe.train.init and not state.update:
        doing += f" from {job.recipe.train.init}, with its network and subwords"
    ranks = f" on {job.world.size} ranks ({job.recipe.train.strategy})" if job.world.size > 1 else ""
    job.reporter.say(
        f"{doing}: {len(texts.corpus):,} pairs, {len(texts.valid.src):,} to validate on; {num / 1e6:.2f} M parameters "
        f"on {job.device} in {'bf16' if job.bf16 else 'fp32'}{ranks}; {job.recipe.train.max_updates:,} updates at "
        f"most, {epoch:,} an epoch."
    )
    if job.device == "cpu" and not job.bf16 and job.recipe.train.precision == "auto":
        job.reporter.say("bf16 is no faster than fp32 on this processor.")


@contextmanager
def naming_want_of_memory(run: Path) -> Generator[None]:
    """A sentence where memory ran out and less at once was no way out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"memory ran out ({str(error).partition(chr(10))[0]}). What was saved is intact; give it more memory, and "
            f"go on: diglot train {shlex.quote(str(run))}"
        ) from None


# ------------------------------------------------------------------- during


@dataclass
class Sums:
    """Of an update, over all ranks: its smoothed loss, its negative log-likelihood, its target pieces."""

    loss: float
    nll: float
    pieces: int


def gradients(job: Job, network: nn.Module, model: Transformer, update: Update) -> Sums:
    """The gradient of an update's mean loss: an exact mean over the pieces of all micro-batches and all ranks."""
    world, smoothing = job.world, job.recipe.train.label_smoothing
    heard = world.gather([update.num_pieces, len(update.micro_batches)])
    num_pieces, num_micros = sum(pieces for pieces, _ in heard), max(micros for _, micros in heard)
    micros = update.micro_batches + [IDLE] * (num_micros - len(update.micro_batches))  # ranks keep in step
    sums = torch.zeros(2, dtype=torch.float64, device=job.device)
    network.train()
    for place, micro in enumerate(micros):
        with sync_gradients(network, place == len(micros) - 1), world.naming_the_lost():
            hidden, wanted = micro.through(network, job.device, job.bf16)
            with torch.autocast(job.device, torch.bfloat16, enabled=job.bf16):
                loss, nll = smoothed_loss(hidden, model.output.weight, model.output.bias, wanted, smoothing)
            (loss * (micro.weight * world.size / num_pieces)).backward()  # times the ranks: they are averaged over
        sums += torch.stack((loss.detach(), nll)) * micro.weight
    shares = world.gather(sums.tolist())
    return Sums(sum(loss for loss, _ in shares), sum(nll for _, nll in shares), num_pieces)


def gradients_in_memory(
    job: Job, network: nn.Module, model: Transformer, reader: UpdateReader, update: Update, state: TrainingState
) -> Sums:
    """The same; if memory runs out, all of the update anew with micro-batches of half the size, as from then on."""
    while True:
        if state.micro_batch < reader.micro_batch:  # the processes that read ahead still cut them larger
            update = reader.read_share(update.place, state.micro_batch)
        try:
            return gradients(job, network, model, update)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        largest = max(micro.src.size + micro.tgt.size for micro in update.micro_batches)
        is_pair = all(len(micro.src) == 1 for micro in update.micro_batches)
        if job.world.size > 1 or is_pair:
            less = f"diglot train {shlex.quote(str(job.run))} data.micro_batch={max(1, largest // 2)}"
            raise TrainingError(
                f"memory ran out in update {state.update + 1:,} on rank {job.world.rank}, with {largest:,} padded "
                f"pieces at once. "
                + ("That is a single pair: begin anew with a lower data.max_pieces." if is_pair else f"Go on: {less}")
            )
        model.zero_grad()
        give_back_freed_memory()
        if job.device == "cuda":
            torch.cuda.empty_cache()
        state.micro_batch, state.memory_splits = max(1, largest // 2), state.memory_splits + 1
        job.reporter.say(
            f"update {state.update + 1:,}: memory ran out; from now on at most {state.micro_batch:,} padded pieces go "
            "through the network at once."
        )


def is_over(state: TrainingState, recipe: Recipe) -> bool:
    """Whether training ends here."""
    return state.update >= recipe.train.max_updates or 0 < recipe.train.patience <= state.stale


def due(update: int, every: int, goal: int) -> bool:
    """Whether something that happens every so many updates, and after the last, happens now."""
    return update % every == 0 or update == goal


def count(
    job: Job, state: TrainingState, corpus: Corpus, place: Place, sums: Sums, norm: float, is_finite: bool
) -> None:
    """Keep account of an update. One whose loss or gradient is no number was left out: its lines are named, and too
    many in a row end the run."""
    state.update, state.pieces = state.update + 1, state.pieces + sums.pieces
    state.epoch, state.update_of_epoch = place.epoch, place.update_of_epoch + 1
    ids = corpus.ids(place.rows).tobytes()
    state.samples = hashlib.blake2b(bytes.fromhex(state.samples) + ids, digest_size=16).hexdigest()
    if is_finite:
        state.skipped_in_a_row = 0
        return
    state.skipped, state.skipped_in_a_row = state.skipped + 1, state.skipped_in_a_row + 1
    path = job.run / SKIPPED
    if job.world.is_first:
        with checkpoint.writing(path), path.open("a", encoding="utf-8") as lines:
            lines.writelines(f"{state.update}\t{corpus.where(row)}\n" for row in place.rows.tolist())
    job.reporter.say(
        f"update {state.update:,} is skipped: its loss is {sums.loss}, the norm of its gradient {norm}. {path} names "
        "its lines."
    )
    if state.skipped_in_a_row >= SKIPS_IN_A_ROW:
        raise TrainingError(
            f"{SKIPS_IN_A_ROW} updates in a row, up to {state.update:,}, had no finite gradient: "
            "training has diverged. Lower train.learning_rate_scale, raise train.warmup_steps or set train.clip_norm=1."
        )


class Meter:
    """Loss and speed since the last line of the log. The sums are part of the state, so that a run that goes on writes
    the line that it would have written."""

    def __init__(self, sums: list[float]) -> None:
        self.sums = sums  # of the loss, of the negative log-likelihood, of the pieces
        self.restart()

    def restart(self) -> None:
        """Measure the speed anew."""
        self.begun, self.timed = time.monotonic(), 0

    def reset(self) -> None:
        """Begin anew, after a line of the log."""
        self.sums[:] = [0.0, 0.0, 0.0]
        self.restart()

    def add(self, sums: Sums) -> None:
        """Count an update."""
        for i, value in enumerate((sums.loss, sums.nll, sums.pieces)):
            self.sums[i] += value
        self.timed += sums.pieces

    @property
    def loss(self) -> float:
        """Smoothed loss of a target piece, in nats."""
        return self.sums[0] / max(1, self.sums[2])

    @property
    def nll(self) -> float:
        """The same without smoothing."""
        return self.sums[1] / max(1, self.sums[2])

    @property
    def speed(self) -> float:
        """Target pieces a second."""
        return self.timed / max(1e-9, time.monotonic() - self.begun)


def validate_and_save(
    job: Job,
    stored: StoredModel,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    valid: ValidationText,
    log: Log,
    signals: Signals,
) -> None:
    """A checkpoint that may be averaged or become the best. A signal ends the validation, not the saving: whoever goes
    on from there validates first."""
    give_back_freed_memory()  # other sizes are asked for now than in an update
    plain = plain_copy(stored)
    scores = validate(job, plain, valid, "greedy", signals)
    if scores:
        watch(job, plain, valid, state.update)
        judge(state, scores)
        log.write(state.update, seconds=state.seconds, **{f"valid_{key}": value for key, value in scores.items()})
        show(job.reporter, state, scores)
    save(job, stored, optimizer, state)
    if not scores:
        raise stopped(job, state, log, signals)


def stopped(job: Job, state: TrainingState, log: Log, signals: Signals) -> Interrupted:
    """What to say, once, when a signal has ended the run, of whichever rank."""
    number = max(job.world.gather(signals.caught))
    log.write(state.update, stopped=number)
    again = f"To go on: diglot train {shlex.quote(str(job.run))}"
    said = f"stopped after update {state.update:,}; all is saved. {again}" if job.world.is_first else ""
    return Interrupted(number, said)


def plain_copy(stored: StoredModel) -> StoredModel:
    """The model as one process holds it, where each rank holds a share of it."""
    if not is_shared_out(stored.model):
        return stored
    model = Transformer(stored.spec.model, stored.src_subwords.num_pieces, stored.tgt_subwords.num_pieces)
    checkpoint.put_weights(model, {name: whole(weight) for name, weight in checkpoint.weights_of(stored.model).items()})
    return dataclasses.replace(stored, model=model)
