"""A run that does nothing but save, to be killed, traced and starved: python saving.py RUN NUM_SAVES.

All weights and moments of a checkpoint are the number of its update, so what is loaded can be told from what should be.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from diglot import checkpoint
from diglot.checkpoint import StoredModel
from diglot.config import ModelConfig, ModelSpec, Recipe, TrainConfig, to_toml
from diglot.errors import DiglotError
from diglot.model import Transformer
from diglot.parallel import World
from diglot.progress import Reporter
from diglot.run import MOMENTS, Job, Log, TrainingState, in_use, restore, save
from diglot.schedule import make_optimizer
from diglot.subwords import Subwords, learn
from diglot.training import find_resumed

INTERVAL = 10
NETWORK = ModelConfig(d_model=8, d_ff=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, max_positions=64)


class Saver:
    """A small network, its optimizer and its state, which go on from what the run holds and only ever save."""

    def __init__(self, run: Path, subwords: Subwords | None = None):
        recipe = Recipe(model=NETWORK, train=TrainConfig(out=str(run), average=2, valid_every=INTERVAL))
        self.run, self.state = run, TrainingState(corpus="corpus")
        self.job = Job(recipe, run, World(), "cpu", False, Reporter(quiet=True))
        resumed = find_resumed(self.job)
        subwords = resumed.src_subwords if resumed else subwords or learn(["one two three", "four five"] * 20, 340)
        model = Transformer(NETWORK, subwords.num_pieces, subwords.num_pieces)
        self.stored = StoredModel(run, ModelSpec(NETWORK), model, subwords, subwords)
        self.optimizer = make_optimizer(model)
        if resumed:
            checkpoint.put_weights(model, checkpoint.weights_of(resumed.model))
            self.state = restore(resumed.path, model, self.optimizer, "corpus")

    def save(self) -> None:
        """Save what the next interval has come to; every third is the best."""
        state = self.state
        state.update += INTERVAL
        number = float(state.update)
        for parameter in self.stored.model.parameters():
            torch.nn.init.constant_(parameter, number)
            moments = {key: torch.full_like(parameter, number) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(number), **moments}
        state.validated.append(state.update)
        if state.update // INTERVAL % 3 == 1:
            state.best_update = state.update
        save(self.job, self.stored, self.optimizer, state)

    def finish(self) -> None:
        """Write a final model over that of before."""
        weights, subwords = checkpoint.weights_of(self.stored.model), self.stored.src_subwords
        card = f"After update {self.state.update}.\n"
        checkpoint.write_directory(
            self.run / "model", checkpoint.model_files(self.stored.spec, weights, subwords, subwords, card)
        )


def number_in(path: Path) -> int:
    """The update that all of a model directory is of; where there are moments and a state, they too."""
    stored = checkpoint.load_model(path)
    numbers = {value for weight in checkpoint.weights_of(stored.model).values() for value in weight.unique().tolist()}
    if (path / MOMENTS).exists():
        optimizer = make_optimizer(stored.model)
        numbers.add(restore(path, stored.model, optimizer, "corpus").update)
        for kept in optimizer.state.values():
            numbers.update(value for moment in kept.values() for value in moment.unique().tolist())
    (number,) = numbers
    return int(number)


@contextmanager
def begun(run: Path):
    """As a training run begins: lock, sweep, go on, write the recipe and the log."""
    recipe = Recipe(train=TrainConfig(out=str(run)))
    with in_use(run, recipe):
        checkpoint.sweep(run)
        saver = Saver(run)
        recipe = dataclasses.replace(saver.job.recipe, train=dataclasses.replace(recipe.train, max_updates=10**6))
        checkpoint.replace_file(run / "config.toml", to_toml(recipe).encode())
        with Log(run, saver.state.update, False) as log:
            yield saver, log


def save_on(run: Path, num_saves: int, report: Callable[[str], object]) -> None:
    """Save so many times; every other time write a final model too. Each is reported when it is done."""
    with begun(run) as (saver, log):
        report(f"begun {saver.state.update}")
        for number in range(num_saves):
            log.write(saver.state.update + INTERVAL, loss=1.5)
            saver.save()
            report(f"saved {saver.state.update} {saver.state.best_update}")
            if number % 2:
                saver.finish()
                report(f"finished {saver.state.update}")


def save_for_ever(run: Path, connection: Connection) -> None:
    """Until somebody kills the process."""
    torch.set_num_threads(1)
    save_on(run, 10**9, connection.send)


def check_next_start(run: Path, reports: list[str]) -> None:
    """Nothing that was reported is lost, nothing is broken, and after a start nothing half-written is left."""
    saved, best, finished = reported(reports)
    for step in checkpoint.list_steps(run):
        assert number_in(step) == int(step.name.removeprefix("step-")), step
    if saved:  # what `diglot translate RUN` finds before anything is put in order
        assert number_in(run / "best") >= best
        assert number_in(checkpoint.find_model(run)) >= min(best, finished or best)
    with begun(run) as (saver, _):
        assert saver.state.update >= saved, f"{saver.state.update} of {saved}"
        names = [path.name for path in run.iterdir()]
        assert not [name for name in names if name.startswith(checkpoint.TEMPORARY)], names
        assert not [name for name in names if name.startswith("broken-")], names
        if finished:
            assert number_in(run / "model") >= finished


def reported(reports: list[str]) -> tuple[int, int, int]:
    """The update saved last, the best and the one of the final model, as a process has reported them."""
    saved = best = finished = 0
    for words in (report.split() for report in reports):
        if words[0] == "saved":
            saved, best = int(words[1]), int(words[2])
        elif words[0] == "finished":
            finished = int(words[1])
    return saved, best, finished


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        save_on(Path(sys.argv[1]), int(sys.argv[2]), lambda text: os.write(1, f"{text}\n".encode()))
    except DiglotError as error:
        sys.exit(f"diglot: {error}")
