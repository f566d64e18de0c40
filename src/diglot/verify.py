"""Proof that a run resumes exactly, on a recipe and data of the user's own.

The recipe is trained straight through for a few seconds, then anew with SIGKILL at random moments, resumed each time,
by processes as a user starts them, in a temporary directory; then all that both have written is compared bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from diglot import checkpoint
from diglot.config import DataConfig, Recipe, to_toml
from diglot.corpus import open_pairs
from diglot.errors import ConfigError, TrainingError
from diglot.parallel import world_asked_for
from diglot.progress import Reporter
from diglot.run import MOMENTS, STATE
from diglot.signals import Signals

EVERY = 2  # updates between checkpoints: a killed run loses some work, and has to do it again
LEAST_UPDATES, MOST_UPDATES = 6, 200
SECONDS = 10.0  # of the straight run, after its start
SLOW = 5.0  # seconds of an update beyond which smaller ones are tried
SHRINK, SMALLEST = 8, 500  # by how much, down to how many target pieces
KILLS = 2
FEW_LINES = 4  # of each validation text: what has learnt nothing writes until its bound
LOOKED_THROUGH = 1000  # lines for the shortest ones
POLL = 0.005  # seconds


@dataclass(frozen=True)
class Verdict:
    """What came of it, in a sentence."""

    is_exact: bool
    said: str


class Trial:
    """Processes that train recipes: as many ranks at a time as torchrun was told to start."""

    def __init__(self, scratch: Path):
        self.scratch, self.num_ranks = scratch, world_asked_for().size

    @contextmanager
    def training(self, recipe: Recipe) -> Generator[list[subprocess.Popen[bytes]]]:
        """Train; at the end of the block whatever still runs is killed."""
        path = self.scratch / "recipe.toml"
        path.write_text(to_toml(recipe), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "diglot", "train", str(path), "--quiet"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        if self.num_ranks > 1:  # where they meet, as torchrun makes it; those that were killed left traces in the last
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(self.num_ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.num_ranks > 1 else {}
                with self.errors_of(rank).open("wb") as errors:
                    processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=errors,
                            env={**environment, **own},
                        )
                    )
            yield processes
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()

    def errors_of(self, rank: int) -> Path:
        """Where a rank complains."""
        return self.scratch / f"errors-{rank}"

    def wait(self, processes: list[subprocess.Popen[bytes]], until: Callable[[], bool]) -> bool:
        """Wait until something is so; False, if the training is done before."""
        while not until():
            codes = [process.poll() for process in processes]
            if all(code == 0 for code in codes):
                return False
            if any(codes):  # neither running nor done
                time.sleep(self.num_ranks - 1)  # for the others' complaints
                said = [line for rank in range(self.num_ranks) for line in self.errors_of(rank).read_text().split("\n")]
                ours = [line.removeprefix("diglot: ") for line in said if line.startswith("diglot: ")]
                raise TrainingError(ours[0] if ours else f"the training that was tried ended with {codes}: {said[-2:]}")
            time.sleep(POLL)
        return True


def verify_resume(recipe: Recipe, quiet: bool = False) -> Verdict | None:
    """Train the recipe straight, then killed and resumed, and compare. None on all ranks but the first."""
    world = world_asked_for()
    if not world.is_first:
        return None
    if world.local_size != world.size:
        raise ConfigError("--verify-resume kills ranks on one machine alone: start torchrun with --nnodes 1.")
    reporter = Reporter(quiet)
    reporter.say(
        "The recipe is trained straight through for some seconds, then again, killed on the way and resumed, in a "
        "temporary directory; subwords and the index of the corpus are made first where there are none yet."
    )
    with (
        tempfile.TemporaryDirectory(prefix="diglot-verify-", ignore_cleanup_errors=True) as name,
        Signals("stopped; nothing is left of the trial."),
    ):
        trial = Trial(Path(name))
        tried, seconds = train_straight(trial, cut_down(recipe, trial.scratch), reporter)
        straight, resumed = Path(tried.train.out), trial.scratch / "resumed"
        reporter.say(f"{tried.train.max_updates} updates are done straight through; now they are done with kills.")
        kills = train_with_kills(trial, writing_to(resumed, tried), seconds)
        step = checkpoint.step_path(straight, tried.train.max_updates).name
        difference = first_difference(straight / step, resumed / step, kills)
    killed = " and ".join(f"after update {update} (resumed after {saved})" for update, saved in kills)
    size = ""
    if tried.train.update_pieces != recipe.train.update_pieces:
        size = f" of {tried.train.update_pieces:,} target pieces instead of {recipe.train.update_pieces:,}"
    ranks = f" on {trial.num_ranks} ranks" if trial.num_ranks > 1 else ""
    what = f"{tried.train.max_updates} updates{size}{ranks}, killed {killed}"
    if difference:
        return Verdict(False, f"Resuming is not exact: in {what}, {difference}.")
    return Verdict(
        True,
        f"Resuming is exact: {what}, agree bit for bit with those of a run that was not killed in samples, losses, "
        "weights, moments and counters.",
    )


# ------------------------------------------------------------------- what is tried


def cut_down(recipe: Recipe, scratch: Path) -> Recipe:
    """The recipe with checkpoints at short intervals and little to validate on; what an update computes is its own."""
    train = dataclasses.replace(
        recipe.train, out=str(scratch / "straight"), max_updates=MOST_UPDATES, valid_every=EVERY, log_every=1,
        patience=0, average=1, tensorboard=False,
    )  # fmt: skip
    search = dataclasses.replace(recipe.search, max_extra=min(recipe.search.max_extra, 5))
    return dataclasses.replace(recipe, train=train, search=search, data=cut_validation(recipe.data, scratch))


def cut_validation(data: DataConfig, scratch: Path) -> DataConfig:
    """A few short lines of each validation text."""
    names: tuple[list[str], list[str]] = ([], [])
    for number, file in enumerate(open_pairs(data.valid_src, data.valid_tgt, data.valid_tsv)):
        file.check()
        spans = (span for _, span in zip(range(LOOKED_THROUGH), file.spans(), strict=False))
        pairs = [(file.src.data[a:b], file.tgt.data[c:d]) for a, b, c, d in spans]
        few = sorted((pair for pair in pairs if all(map(bytes.strip, pair))), key=lambda pair: sum(map(len, pair)))
        for side, texts in enumerate(zip(*(few or pairs)[:FEW_LINES], strict=True)):
            path = scratch / f"valid-{number}-{side}"
            path.write_bytes(b"".join(text + b"\n" for text in texts))
            names[side].append(str(path))
    num_held_out = min(data.held_out, FEW_LINES)
    src, tgt = map(tuple, names)
    return dataclasses.replace(data, valid_src=src, valid_tgt=tgt, valid_tsv=(), held_out=num_held_out)


def writing_to(run: Path, recipe: Recipe) -> Recipe:
    """The same recipe in another place."""
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, out=str(run)))


def shrink(recipe: Recipe) -> Recipe:
    """The recipe with smaller updates, cut into as many micro-batches as before."""
    data, train = recipe.data, recipe.train
    if isinstance(data.micro_batch, int):
        data = dataclasses.replace(data, micro_batch=max(1, data.micro_batch // SHRINK))
    train = dataclasses.replace(train, update_pieces=max(SMALLEST, train.update_pieces // SHRINK))
    return dataclasses.replace(recipe, data=data, train=train)


# ------------------------------------------------------------------- the runs


def train_straight(trial: Trial, recipe: Recipe, reporter: Reporter) -> tuple[Recipe, float]:
    """Train for some seconds. The recipe of as many updates as were done, and the seconds that one takes."""
    run = Path(recipe.train.out)
    log = run / "log.jsonl"
    with trial.training(recipe) as processes:
        trial.wait(processes, log.exists)
        begun = time.monotonic()
        trial.wait(processes, lambda: bool(losses_of(run)) or time.monotonic() - begun > SLOW)
        is_too_slow = not losses_of(run) and recipe.train.update_pieces > SMALLEST
        if not is_too_slow:
            trial.wait(processes, lambda: time.monotonic() - begun > SECONDS and newest_update(run) >= LEAST_UPDATES)
    if is_too_slow:
        recipe = shrink(recipe)
        reporter.say(f"An update takes over {SLOW:.0f} s; updates of {recipe.train.update_pieces:,} pieces are tried.")
        shutil.rmtree(run)
        return train_straight(trial, recipe, reporter)
    done = newest_update(run)
    state = read_state(checkpoint.step_path(run, done))
    return (
        dataclasses.replace(
            recipe,
            train=dataclasses.replace(recipe.train, max_updates=done),
            data=dataclasses.replace(recipe.data, micro_batch=state["micro_batch"]),  # where memory has chosen it
        ),
        state["seconds"] / done,
    )


def train_with_kills(trial: Trial, recipe: Recipe, seconds: float) -> list[tuple[int, int]]:
    """Train to the end, killed at random moments after the first checkpoint. After which updates that was, and which
    checkpoints were gone on from."""
    run, kills = Path(recipe.train.out), list[tuple[int, int]]()
    log = run / "log.jsonl"
    while not kills:  # a run of few short updates may be done before it is killed
        shutil.rmtree(run, ignore_errors=True)
        for moment in sorted(random.sample(range(EVERY, recipe.train.max_updates - 1), KILLS)):
            before = log.stat().st_ino if log.exists() else None  # a resumed run writes its log anew
            with trial.training(recipe) as processes:
                is_on_its_way = trial.wait(
                    processes,
                    lambda before=before, moment=moment: (
                        log.exists() and log.stat().st_ino != before and max(losses_of(run), default=0) >= moment
                    ),
                )
                time.sleep(random.uniform(0, seconds))
                is_on_its_way = is_on_its_way and all(process.poll() is None for process in processes)
            if is_on_its_way:
                kills.append((max(losses_of(run)), newest_update(run)))
        with trial.training(recipe) as processes:
            trial.wait(processes, lambda: False)
    return kills


def losses_of(run: Path) -> dict[int, dict[str, Any]]:
    """What the log says of each update, but for what depends on the time."""
    path, found = run / "log.jsonl", dict[int, dict[str, Any]]()
    for text in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue  # half a line
        if "loss" in line:
            found[line["update"]] = {name: value for name, value in line.items() if name != "pieces_per_second"}
    return found


def newest_update(run: Path) -> int:
    """The newest checkpoint, by its update; 0 without one."""
    return max((int(step.name[5:]) for step in checkpoint.list_steps(run)), default=0)


def read_state(step: Path) -> dict[str, Any]:
    """The counters of a checkpoint."""
    return json.loads((step / STATE).read_bytes())


# ------------------------------------------------------------------- the comparison


def first_difference(straight: Path, resumed: Path, kills: list[tuple[int, int]]) -> str | None:
    """Where two checkpoints of the same update differ first, in the order in which one thing leads to another."""
    one, two = read_state(straight), read_state(resumed)
    losses = losses_of(straight.parent), losses_of(resumed.parent)
    for update in range(1, one["update"] + 1):
        a, b = (each.get(update, {}) for each in losses)
        for name in a | b:
            if a.get(name) != b.get(name):
                said = f"the {name} of update {update} differs: {a.get(name)} and, resumed, {b.get(name)}"
                if one["samples"] != two["samples"]:
                    return f"the ids of the samples differ, and {said}"
                is_before = update <= kills[0][1]
                return f"{said}; so it does before anything was killed: no two runs agree here" if is_before else said
    if one["samples"] != two["samples"]:
        return "the ids of the samples differ"
    for file, what in ((checkpoint.WEIGHTS, "weights"), (MOMENTS, "moments of the optimizer")):
        a, b = (checkpoint.read_tensors(step / file) for step in (straight, resumed))
        for name in a | b:
            if name not in a or name not in b or a[name].numpy().tobytes() != b[name].numpy().tobytes():
                return f"the losses agree, but {name} of the {what} differs"
    for name in one | two:
        if name != "seconds" and one.get(name) != two.get(name):
            return f"the tensors agree, but {name} of the state differs: {one.get(name)} and, resumed, {two.get(name)}"
    return None
