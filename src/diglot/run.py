"""A run directory: what a training run writes, and all that it needs to go on.

config.toml (the resolved recipe) · log.jsonl · dropped.tsv · skipped.tsv · tensorboard/ · broken-step-... (set aside)
step-000500/ (a model directory, with training.safetensors and state.json) · best -> · model/ (the final, averaged)
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from diglot import checkpoint
from diglot.checkpoint import StoredModel
from diglot.config import ModelConfig, Recipe, SubwordsConfig, differences, from_dict, read_toml, to_toml
from diglot.errors import CheckpointError, ConfigError, TextError, TrainingError
from diglot.model import Transformer
from diglot.parallel import World, share_like, whole
from diglot.progress import Reporter

T = TypeVar("T")

MOMENTS = "training.safetensors"
STATE = "state.json"
SKIPPED = "skipped.tsv"
# what may differ from run to run of one recipe: it changes where, how long or how visibly a model is trained
FREE_KEYS = {
    "train.out", "train.device", "train.threads", "train.log_every", "train.tensorboard", "train.watch",
    "train.max_updates", "train.patience", "train.strategy", "train.rank_timeout",
}  # fmt: skip
# what a run cannot change, whoever names it: the weights would not fit, or mean something else
FIXED_KEYS = {
    *(f"model.{f.name}" for f in dataclasses.fields(ModelConfig) if "dropout" not in f.name),
    *(f"subwords.{f.name}" for f in dataclasses.fields(SubwordsConfig) if f.name != "sampling"),
    "train.init", "data.tgt_langs", "languages.tags",
}  # fmt: skip
SECONDS_TO_SEE = 65.0  # NFS remembers a directory for up to 60
SECONDS_TO_LOCK = 1.0  # for who only looks whether a run goes on holds its lock for an instant
OURS = {".lock", "dropped.tsv"}  # what a run that failed before its first update leaves


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
    best_nll: float = 0.0
    best_update: int = 0
    stale: int = 0  # validations since the best
    validated: list[int] = field(default_factory=list[int])  # updates whose checkpoints may be averaged
    since_log: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # sums since the last line of the log
    corpus: str = ""  # fingerprint
    samples: str = ""  # hash of the pairs of all updates, in their order
    micro_batch: int = 0  # padded pieces at once, as chosen or as memory allowed
    memory_splits: int = 0  # how often memory ran out
    bf16: bool | None = None  # whether products are in bf16, as the recipe says or was measured when the run began


@dataclass(frozen=True)
class Job:
    """What is trained, where it is written, who takes part and on what."""

    recipe: Recipe
    run: Path
    world: World
    device: str
    bf16: bool
    reporter: Reporter


@contextmanager
def in_use(run: Path, recipe: Recipe) -> Generator[None]:
    """Make the run directory ours, or refuse: two processes in one would destroy each other's work."""
    if not recipe.train.out:
        raise ConfigError("where to? Name the run directory: --out runs/NAME, or train.out in the recipe.")
    try:
        checkpoint.make_directory(run)
        foreign = sorted(
            path.name
            for path in run.iterdir()
            if path.name not in OURS and not path.name.startswith(checkpoint.TEMPORARY)
        )
        if foreign and (checkpoint.MANIFEST in foreign or not is_recipe(run / "config.toml")):
            raise ConfigError(f"{run} holds other files ({foreign[0]}); name a new or empty directory with --out.")
        lock = (run / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to {run}: {error.strerror}.") from None
    os.register_at_fork(after_in_child=lock.close)  # what reads ahead may outlive us a little, and must not keep it
    with lock:
        until = time.monotonic() + SECONDS_TO_LOCK
        while not is_locked(lock):
            if time.monotonic() > until:
                raise TrainingError(f"{run} is in use by another process; wait for it, or choose another --out.")
            time.sleep(SECONDS_TO_LOCK / 10)
        yield


def is_locked(file: TextIO) -> bool:
    """Lock a file, unless another process holds it. The lock ends with the process, however that ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_recipe(path: Path) -> bool:
    """Whether a file is the recipe of a run."""
    try:
        from_dict(Recipe, read_toml(path), str(path))
    except ConfigError:
        return False
    return True


def resolve(recipe: Recipe, changed: frozenset[str]) -> tuple[Recipe, StoredModel | None]:
    """Check what only files can tell. With train.init its network and languages become the recipe's; a run that was
    begun before goes on with its own recipe, but for what may change or is named in `changed`."""
    data = recipe.data
    if not data.src and not data.tsv:
        raise ConfigError("nothing to train on: give --src and --tgt files, or --tsv (data.src, data.tgt, data.tsv).")
    tags = tuple(dict.fromkeys(data.tgt_langs))
    if len(tags) > 1 and (data.valid_src or data.valid_tsv) and not data.valid_tgt_langs:
        raise ConfigError("data.tgt_langs needs data.valid_tgt_langs: into which language to validate each file.")
    init = old = None
    run = Path(recipe.train.out)
    if checkpoint.list_steps(run):
        old = from_dict(Recipe, read_toml(run / "config.toml"), str(run / "config.toml"))
        if recipe.train.init and recipe.train.init == old.train.init:  # resolved when the run was begun
            kept = {name: getattr(old, name) for name in ("model", "languages", "subwords")}
            recipe = dataclasses.replace(recipe, **kept)
    elif recipe.train.init:
        init = checkpoint.load_model(Path(recipe.train.init))
        own = {name: getattr(recipe.model, name) for name in ("dropout", "attention_dropout", "ffn_dropout")}
        joint = init.spec.model.tie == "all" or init.src_subwords == init.tgt_subwords  # one numbering of pieces
        recipe = dataclasses.replace(
            recipe,
            model=dataclasses.replace(init.spec.model, **own),
            languages=dataclasses.replace(
                recipe.languages,
                src=recipe.languages.src or init.spec.languages.src,
                tgt=recipe.languages.tgt or init.spec.languages.tgt,
            ),
            subwords=dataclasses.replace(recipe.subwords, joint=joint, model="", src_model="", tgt_model=""),
        )
        tags = tuple(dict.fromkeys((*init.spec.languages.tags, *tags)))
    if len(tags) > 1 and not recipe.languages.tags:
        recipe = dataclasses.replace(recipe, languages=dataclasses.replace(recipe.languages, tags=tags))
    for language in data.valid_tgt_langs:
        if language not in (recipe.languages.tags or (*data.tgt_langs, recipe.languages.tgt)):
            raise ConfigError(f"data.valid_tgt_langs names '{language}', into which nothing is trained.")
    if old:
        refuse_changes(run, old, recipe, changed)
    return recipe, init


def refuse_changes(run: Path, old: Recipe, new: Recipe, changed: frozenset[str]) -> None:
    """Refuse to go on with a run that was begun with another recipe, and print the difference."""
    every = differences(old, new)
    differ = {key: values for key, values in every.items() if key not in FREE_KEYS}
    listed = ", ".join(f"{key} was {a!r} and is {b!r}" for key, (a, b) in differ.items() if key not in changed)
    fixed = ", ".join(f"{key} was {a!r} and is {b!r}" for key, (a, b) in differ.items() if key in FIXED_KEYS)
    if fixed:
        raise ConfigError(f"{run} cannot go on as another model: {fixed}. Choose another --out.")
    if listed:
        words = [f"{key}={json.dumps(b, ensure_ascii=False)}" for key, (_, b) in every.items() if key != "train.out"]
        raise ConfigError(
            f"{run} was begun with another recipe: {listed}. Choose another --out, or go on with the change: "
            f"{shlex.join(['diglot', 'train', str(run), *words])}"
        )


def check_same_recipe(job: Job) -> None:
    """Refuse to train where ranks have different recipes, or run on different kinds of machines."""
    own = dataclasses.asdict(job.recipe) | {"machine": {"device": job.device, "bf16": job.bf16}}
    first, *others = (flat(each) for each in job.world.gather(own))
    for rank, other in enumerate(others, 1):
        differ = ", ".join(
            f"{key} is {other[key]!r} and not {first[key]!r}" for key in first if other[key] != first[key]
        )
        if differ:
            raise TrainingError(
                f"rank {rank} has another recipe than rank 0: {differ}. Give all ranks the same recipe, and say in it "
                "what their machines would choose differently (train.device, train.precision)."
            )


def flat(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Section and key in one."""
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


def write_recipe(job: Job) -> None:
    """Write the recipe of the run; every rank has to find it there."""
    path, content = job.run / "config.toml", to_toml(job.recipe).encode()
    if job.world.is_first:
        checkpoint.replace_file(path, content)
    job.world.gather(None)
    see_alike(job, lambda: path.exists() and path.read_bytes() == content, bool)


def see_alike(job: Job, look: Callable[[], T], name: Callable[[T], Any]) -> T:
    """What every rank sees, told apart by name. Where one sees something else than the first, all look again: a network
    file system shows a machine its directories as they were up to a minute ago."""
    until = time.monotonic() + SECONDS_TO_SEE
    while True:
        found = look()
        seen = job.world.gather([name(found), time.monotonic() > until])
        first, is_late = seen[0]  # by one clock, so that all give up together
        differ = [rank for rank, (other, _) in enumerate(seen) if other != first]
        if not differ:
            return found
        if is_late:
            raise TrainingError(
                f"rank {differ[0]} does not see what rank 0 writes to {job.run}: let train.out be a directory that all "
                "machines share."
            )
        time.sleep(1)


class Log:
    """log.jsonl, and TensorBoard's files on request; of skipped.tsv too what is about to be written again goes."""

    def __init__(self, run: Path, update: int, tensorboard: bool, is_kept: bool = True):
        self.is_kept = is_kept  # by the rank that writes
        self.board: Any = None
        if not is_kept:
            return
        self.path = run / "log.jsonl"
        cut_back(self.path, update, lambda line: json.loads(line)["update"])
        if (run / SKIPPED).exists():
            cut_back(run / SKIPPED, update, lambda line: int(line[: line.index("\t")]))
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ConfigError("train.tensorboard needs TensorBoard: pip install 'diglot[track]'") from None
            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=update)  # pyright: ignore[reportUnknownVariableType]
        self.file = self.path.open("a", encoding="utf-8")

    def write(self, update: int, **values: Any) -> None:
        """One line; what is no number is null, as JSON has it."""
        if not self.is_kept:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with checkpoint.writing(self.path):
            self.file.write(json.dumps({"update": update, **finite}) + "\n")
            self.file.flush()
        if self.board is not None:
            for name, value in finite.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(name, value, update)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_kept:
            with contextlib.suppress(OSError):  # of a line that could not be written; that was told
                self.file.close()
        if self.board is not None:
            self.board.close()


def cut_back(path: Path, update: int, update_of: Callable[[str], int]) -> None:
    """Keep the lines of a file up to an update: those after the checkpoint are about to be written again."""
    kept: list[str] = []
    if update and path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                kept += [line] if update_of(line) <= update else []
            except (ValueError, KeyError, TypeError):
                continue  # half a line, of a killed process
    checkpoint.replace_file(path, "".join(line + "\n" for line in kept).encode())


def save(job: Job, stored: StoredModel, optimizer: torch.optim.Optimizer, state: TrainingState) -> None:
    """Write a checkpoint and remove those that nothing needs any more; every rank has to come here."""
    weights: dict[str, Tensor] = {}
    moments = {"step": torch.tensor(0.0)}
    for name, parameter in stored.model.named_parameters():
        kept = optimizer.state[parameter]  # empty before the first step
        weights[name] = whole(parameter.detach())
        for key in ("exp_avg", "exp_avg_sq"):
            moments[f"{key}.{name}"] = whole(kept[key]).cpu().contiguous() if kept else torch.zeros(parameter.shape)
        moments["step"] = kept["step"].cpu() if kept else moments["step"]
    if job.world.is_first:
        run = job.run
        # safetensors ends the process where it is refused memory; this is refused with an error
        np.empty(2 * sum(tensor.nbytes for tensor in (*weights.values(), *moments.values())), np.uint8)
        card = f"A checkpoint of a training run, after update {state.update}.\n"
        files = checkpoint.model_files(stored.spec, weights, stored.src_subwords, stored.tgt_subwords, card)
        files[MOMENTS] = safetensors.torch.save(moments)
        files[STATE] = (json.dumps(dataclasses.asdict(state), indent=1) + "\n").encode()
        checkpoint.write_directory(checkpoint.step_path(run, state.update), files)
        if state.best_update:
            checkpoint.link_best(run, checkpoint.step_path(run, state.best_update))
        keep = {*state.validated[-job.recipe.train.average :], state.best_update}
        checkpoint.prune(run, keep={checkpoint.step_path(run, update).name for update in keep}, newest=2)
    job.world.wait_for_all()  # nobody reads what is not yet written


@contextmanager
def refusing_what_is_broken(path: Path) -> Generator[None]:
    """A sentence where the training state of a checkpoint cannot be read."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointError(
            f"{path} is no checkpoint to go on from: its training state is missing or broken."
        ) from None


def read_state(path: Path) -> TrainingState:
    """The counters of a checkpoint."""
    with refusing_what_is_broken(path):
        return TrainingState(**json.loads((path / STATE).read_bytes()))


def restore(path: Path, model: Transformer, optimizer: torch.optim.Optimizer, fingerprint: str) -> TrainingState:
    """The optimizer's moments and the counters as the checkpoint has them."""
    state = read_state(path)
    with refusing_what_is_broken(path):
        moments = checkpoint.read_tensors(path / MOMENTS)
        steps = moments["step"]
    if state.corpus != fingerprint:
        raise TextError(
            f"the pairs are not those that {path.parent} was begun with; give back the old text and the old filters, "
            f"or begin a new run with train.init={path}"
        )
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": steps.to(parameter.device, copy=True),  # where the fused kernel looks for it
            "exp_avg": share_like(moments[f"exp_avg.{name}"], parameter),
            "exp_avg_sq": share_like(moments[f"exp_avg_sq.{name}"], parameter),
        }
    return state
