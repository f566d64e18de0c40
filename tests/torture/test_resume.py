"""Runs that are killed, stopped and resumed, as processes of their own: they come to what an unbroken run comes to."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from conftest import Torture
from diglot.checkpoint import WEIGHTS, list_steps
from diglot.config import Recipe, to_toml
from diglot.corpus import MAKING
from diglot.run import MOMENTS, STATE
from training_runs import small_recipe, write_pairs

pytestmark = pytest.mark.slow

LONG = 300  # seconds after which a test gives up
TIMED = {"seconds", "pieces_per_second"}


class Started:
    """A training of a recipe on so many ranks, by the command that a user types."""

    def __init__(self, recipe: Path, ranks: int, **environment: str):
        self.said = recipe.with_suffix(".said")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        with self.said.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, "-m", "diglot", "train", str(recipe), "--quiet"],
                stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )  # fmt: skip

    def wait_until(self, is_so: Callable[[], bool], seconds: float = LONG) -> bool:
        """Whether something comes about before the training ends."""
        end = time.monotonic() + seconds
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True

    def family(self) -> list[int]:
        """The process and all that descend from it."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return found

    def kill(self) -> None:
        """SIGKILL to all of them."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start() -> Generator[Callable[..., Started]]:
    """Start a training; what is left of it at the end is killed."""
    every: list[Started] = []

    def begin(recipe: Path, ranks: int = 1, **environment: str) -> Started:
        every.append(Started(recipe, ranks, **environment))
        return every[-1]

    yield begin
    for one in every:
        one.kill()


def write_recipe(recipe: Recipe, name: str) -> Path:
    path = Path(recipe.train.out).parent / f"{name}.toml"
    path.write_text(to_toml(recipe))
    return path


def finish(started: Started) -> None:
    assert started.process.wait(LONG) == 0, started.said.read_text()


def log_of(run: Path) -> list[dict[str, object]]:
    lines = (run / "log.jsonl").read_text().split("\n")[:-1] if (run / "log.jsonl").exists() else []
    return [{name: value for name, value in json.loads(line).items() if name not in TIMED} for line in lines]


def all_of(run: Path) -> dict[str, object]:
    """All that a run came to, but for what it took."""
    step = list_steps(run)[-1]
    state = {name: value for name, value in json.loads((step / STATE).read_bytes()).items() if name not in TIMED}
    files = [step / WEIGHTS, step / MOMENTS, run / "model" / WEIGHTS]
    tensors = {str(path.relative_to(run)): path.read_bytes() for path in files}
    lines = {f"{line['update']} {sorted(line)}": line for line in log_of(run) if "stopped" not in line}
    return {"state": state, **tensors, **lines}


def assert_same(one: dict[str, object], two: dict[str, object], when: object) -> None:
    differ = [name for name in one | two if one.get(name) != two.get(name)]
    assert not differ, (when, differ)


# ------------------------------------------------------------------- killed


@pytest.mark.parametrize(("kind", "ranks"), [("unigram", 1), ("unigram", 2), ("bpe", 1)])
def test_a_run_that_is_killed_again_and_again_comes_to_the_same(
    kind: str, ranks: int, tmp_path: Path, torture: Torture, start: Callable[..., Started]
):
    if kind == "bpe" and not torture.is_full:
        pytest.skip("in full only")
    write_pairs(tmp_path, "more", 60, seed=3)
    corpora = [json.dumps([str(tmp_path / f"{name}.{side}") for name in ("train", "more")]) for side in ("en", "de")]
    recipe = small_recipe(
        tmp_path, "straight", f"data.src={corpora[0]}", f"data.tgt={corpora[1]}", "data.weights=[0.7, 2.0]",
        "data.temperature=2", "data.micro_batch=120", f"subwords.type={kind}", "subwords.sampling=0.2",
        "train.valid_every=4", "train.patience=4", "train.max_updates=400", "train.average=3",
        "train.update_pieces=500",
    )  # fmt: skip
    path = write_recipe(recipe, "recipe")
    begun = time.monotonic()
    finish(start(path, ranks))
    seconds = time.monotonic() - begun
    straight = all_of(tmp_path / "straight")
    state = straight["state"]
    assert (state["stale"], state["epoch"] > 1, state["update"] > 16) == (4, True, True)  # or less is tested

    run, num = tmp_path / "run", torture.times(20)
    path.write_text(path.read_text().replace(str(tmp_path / "straight"), str(run)))
    kills, num_runs = list[float](), 0
    while len(kills) < num or not (run / "model").exists():
        started, moment = start(path, ranks), random.uniform(0, seconds)
        if len(kills) < num and not started.wait_until(lambda: False, moment) and started.process.poll() is None:
            kills.append(moment)
            started.kill()
            continue
        finish(started)
        assert_same(straight, all_of(run), kills)
        num_runs += 1
        if len(kills) < num:
            shutil.rmtree(run)
    what = f"SIGKILL at random times of training, {ranks} rank{'s' * (ranks > 1)}, {kind} sampling, accumulation, "
    torture.report(
        f"{what}mixed corpora, over ends of epochs until patience ends it",
        "resumed, bit for bit the unbroken run: weights, moments, state, samples, losses",
        f"{num} kills, {num_runs} of {num_runs} runs the same",
    )


# ------------------------------------------------------------------- other worlds


def test_one_rank_then_two_then_one_lose_nothing(tmp_path: Path, torture: Torture, start: Callable[..., Started]):
    words = ("train.max_updates=15", "train.valid_every=5", "subwords.sampling=0.2", "train.precision=fp32")
    straight = small_recipe(tmp_path, "straight", *words)
    finish(start(write_recipe(straight, "straight")))
    for ranks, goal in ((1, 5), (2, 10), (1, 15)):
        path = write_recipe(small_recipe(tmp_path, "run", *words, f"train.max_updates={goal}"), f"goal-{goal}")
        finish(start(path, ranks))
    runs = all_of(tmp_path / "straight"), all_of(tmp_path / "run")
    states = [run["state"] for run in runs]
    assert states[0]["samples"] == states[1]["samples"]
    losses = [{line["update"]: line["loss"] for line in log_of(tmp_path / run) if "loss" in line}
              for run in ("straight", "run")]  # fmt: skip
    assert losses[0].keys() == losses[1].keys() == set(range(1, 16))
    worst = max(abs(losses[0][update] / losses[1][update] - 1) for update in losses[0])
    assert worst < 1e-4
    torture.report(
        "a run on one rank, gone on with on two, then on one", "the same samples; losses equal to rounding",
        f"the same samples, losses within {worst:.1e}",
    )  # fmt: skip


# ------------------------------------------------------------------- stopped

SENTENCE = re.compile(r"^diglot: stopped .*$", re.M)
VALID_EVERY, GOAL = 3, 6


def is_learning(run: Path, cache: Path) -> bool:
    return (run / ".lock").exists() and not list(cache.glob("subwords-*"))


def is_indexing(run: Path, cache: Path) -> bool:
    return bool(list(cache.glob(f"{MAKING}index-*")))


def is_updating(run: Path, cache: Path) -> bool:
    return any("loss" in line for line in log_of(run))


def is_validating(run: Path, cache: Path) -> bool:
    return any(line["update"] == VALID_EVERY for line in log_of(run))


def is_scoring(run: Path, cache: Path) -> bool:
    return (run / f"step-{GOAL:06d}").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_ends_a_run_soon_whatever_it_does(
    ranks: int, tmp_path: Path, torture: Torture, start: Callable[..., Started]
):
    write_pairs(tmp_path, "train", 30_000, seed=1)
    write_pairs(tmp_path, "valid", 1000, seed=2)
    recipe = small_recipe(
        tmp_path, "run", f"train.max_updates={GOAL}", f"train.valid_every={VALID_EVERY}", "search.method=greedy"
    )
    path, run, cache, slowest, num = write_recipe(recipe, "recipe"), tmp_path / "run", tmp_path / "cache", 0.0, 0
    for repetition in range(max(1, torture.times(20) // 4)):
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
        for place, phase in enumerate((is_learning, is_indexing, is_updating, is_validating, is_scoring)):
            number = (signal.SIGTERM, signal.SIGINT)[(repetition + place) % 2]
            started = start(path, ranks, DIGLOT_CACHE=str(cache))
            assert started.wait_until(lambda phase=phase: phase(run, cache)), started.said.read_text()
            time.sleep(random.uniform(0.01, 0.3) if phase in (is_learning, is_validating, is_scoring) else 0)
            family, begun = started.family(), time.monotonic()
            started.process.send_signal(number)
            code = started.process.wait(LONG)
            seconds, said = time.monotonic() - begun, started.said.read_text()
            assert len(SENTENCE.findall(said)) == 1, (phase, said)
            assert "all is saved" in said or phase in (is_learning, is_indexing), (phase, said)
            assert code == 128 + number if ranks == 1 else code, (phase, said)
            assert seconds < 10, (phase, seconds)
            assert ranks > 1 or said.count("\n") == 1, (phase, said)
            assert not list(cache.glob(".*")), phase
            assert_gone(family, seconds=8)
            slowest, num = max(slowest, seconds), num + 1
        finish(start(path, ranks, DIGLOT_CACHE=str(cache)))
    torture.report(
        f"SIGTERM and Ctrl-C, {ranks} rank{'s' * (ranks > 1)}, while subwords are learnt, the index is made, in "
        "updates, validation and the final scoring",
        "ends within 10 s with one sentence; goes on afterwards",
        f"{num} of {num}, the slowest in {slowest:.1f} s",
    )


def assert_gone(pids: list[int], seconds: float) -> None:
    """What reads ahead notices within five seconds that nobody asks any more."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"
