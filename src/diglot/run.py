"""A run directory: what a training run writes, and all that it needs to go on.

config.toml (the resolved recipe) · log.jsonl · dropped.tsv · tensorboard/ · text/ (unpacked .gz)
step-000500/ (a model directory, with training.safetensors and state.json) · best -> · model/ (the final, averaged)
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from diglot import checkpoint
from diglot.checkpoint import StoredModel
from diglot.config import Recipe, differences, from_dict, read_toml, to_toml
from diglot.errors import CheckpointError, ConfigError, TextError, TrainingError
from diglot.model import Transformer

MOMENTS = "training.safetensors"
STATE = "state.json"
# what may differ from run to run of one recipe: it changes where, how long or how visibly a model is trained
FREE_KEYS = {
    "train.out", "train.device", "train.threads", "train.log_every", "train.tensorboard", "train.max_updates",
    "train.patience",
}  # fmt: skip


@dataclass
class TrainingState:
    """Where a run stands; with the weights and the optimizer's moments it is all that going on needs."""

    update: int = 0
    epoch: int = 0
    update_of_epoch: int = 0
    pieces: int = 0  # target pieces seen
    seconds: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best_bleu: float = -1.0
    best_update: int = 0
    stale: int = 0  # validations since the best
    validated: list[int] = field(default_factory=list[int])  # updates whose checkpoints may be averaged
    corpus: str = ""  # fingerprint


@contextmanager
def in_use(run: Path, recipe: Recipe) -> Generator[None]:
    """Make the run directory ours, or refuse: two processes in one would destroy each other's work."""
    if not recipe.train.out:
        raise ConfigError("where to? Name the run directory: --out runs/NAME, or train.out in the recipe.")
    try:
        run.mkdir(parents=True, exist_ok=True)
        foreign = [path.name for path in run.iterdir() if path.name != ".lock"]
        if foreign and not (run / "config.toml").exists() and set(foreign) != {"text"}:
            raise ConfigError(
                f"{run} holds other files ({sorted(foreign)[0]}); name a new or empty directory with --out."
            )
        lock = (run / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to {run}: {error.strerror}.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainingError(f"{run} is in use by another process; wait for it, or choose another --out.") from None
        yield


def begin(run: Path, recipe: Recipe, changed: frozenset[str]) -> None:
    """Write the resolved recipe; refuse to go on with a run that was begun with another."""
    checkpoint.sweep(run)
    path = run / "config.toml"
    if path.exists() and checkpoint.list_steps(run):
        old = from_dict(Recipe, read_toml(path), str(path))
        differ = {k: v for k, v in differences(old, recipe).items() if k not in FREE_KEYS | changed}
        if differ:
            listed = ", ".join(f"{key} was {a!r} and is {b!r}" for key, (a, b) in differ.items())
            again = " ".join(f"{key}=..." for key in differ)
            raise ConfigError(
                f"{run} was begun with another recipe: {listed}. Choose another --out, or go on with the change: "
                f"diglot train {run} {again}"
            )
    checkpoint.replace_file(path, to_toml(recipe).encode())


class Log:
    """log.jsonl, and TensorBoard's files on request."""

    def __init__(self, run: Path, update: int, tensorboard: bool):
        self.path = run / "log.jsonl"
        kept: list[str] = []
        if update and self.path.exists():  # lines after the checkpoint are about to be written again
            for line in self.path.read_text(encoding="utf-8").split("\n"):
                try:
                    kept += [line] if json.loads(line)["update"] <= update else []
                except (ValueError, KeyError, TypeError):
                    continue  # half a line, of a killed process
        checkpoint.replace_file(self.path, "".join(line + "\n" for line in kept).encode())
        self.board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ConfigError("train.tensorboard needs TensorBoard: pip install 'diglot[track]'") from None
            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=update)  # pyright: ignore[reportUnknownVariableType]
        self.file = self.path.open("a", encoding="utf-8")

    def write(self, update: int, **values: Any) -> None:
        """One line."""
        self.file.write(json.dumps({"update": update, **values}) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(name, value, update)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def save(run: Path, stored: StoredModel, optimizer: torch.optim.Optimizer, state: TrainingState, average: int) -> None:
    """Write a checkpoint and remove those that nothing needs any more."""
    moments: dict[str, Tensor] = {}
    for name, parameter in stored.model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            moments["step" if key == "step" else f"{key}.{name}"] = value.cpu().contiguous()
    moments.setdefault("step", torch.tensor(0.0))
    for name, parameter in stored.model.named_parameters():  # before the first step there are no moments
        for key in ("exp_avg", "exp_avg_sq"):
            moments.setdefault(f"{key}.{name}", torch.zeros_like(parameter, device="cpu"))
    card = f"A checkpoint of a training run, after update {state.update}.\n"
    files = checkpoint.model_files(
        stored.spec, checkpoint.weights_of(stored.model), stored.src_subwords, stored.tgt_subwords, card
    )
    files[MOMENTS] = safetensors.torch.save(moments)
    files[STATE] = (json.dumps(dataclasses.asdict(state), indent=1) + "\n").encode()
    path = checkpoint.step_path(run, state.update)
    checkpoint.write_directory(path, files)
    if state.best_update:
        checkpoint.link_best(run, checkpoint.step_path(run, state.best_update))
    keep = {*state.validated[-average:], state.best_update}
    checkpoint.prune(run, keep={checkpoint.step_path(run, update).name for update in keep}, newest=2)


def restore(
    path: Path, stored: StoredModel, model: Transformer, optimizer: torch.optim.Optimizer, fingerprint: str
) -> TrainingState:
    """Weights, moments and counters as the checkpoint has them."""
    try:
        state = TrainingState(**json.loads((path / STATE).read_bytes()))
        moments = checkpoint.read_tensors(path / MOMENTS)
        steps = moments["step"]
    except (OSError, ValueError, TypeError, KeyError):
        raise CheckpointError(
            f"{path} is no checkpoint to go on from: its training state is missing or broken."
        ) from None
    if state.corpus != fingerprint:
        raise TextError(
            f"the corpus is not the one that {path.parent} was begun with; give back the old text, or begin a new run "
            f"with train.init={path}"
        )
    checkpoint.put_weights(model, checkpoint.weights_of(stored.model))
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": steps.clone(),
            "exp_avg": moments[f"exp_avg.{name}"].to(parameter.device),
            "exp_avg_sq": moments[f"exp_avg_sq.{name}"].to(parameter.device),
        }
    return state
