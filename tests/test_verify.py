"""`diglot train --verify-resume`: it passes where resuming is exact, and names what differs where it is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diglot.config import to_toml
from diglot.training import train
from diglot.verify import first_difference
from training_runs import small_recipe

LAST = "step-000006"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verify")
    train(small_recipe(directory, "run"), quiet=True)
    return directory / "run"


def alter_json(path: Path, change: Callable[[dict], None], line: int = 0) -> None:
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.suffix == ".jsonl" else []
    values = lines[line] if lines else json.loads(path.read_text())
    change(values)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines or [values]))


def alter_tensor(path: Path, name: str) -> None:
    tensors = load_file(path)
    flat = tensors[name].view(-1)
    flat[0] = torch.nextafter(flat[0], flat[0] + 1)  # the last bit
    save_file(tensors, path)


MOMENT, WEIGHT = "exp_avg_sq.encoder.layers.0.feed_forward.w_1.weight", "decoder.layers.0.cross_attention.w_k.weight"


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda run: None, None),
        (lambda run: alter_json(run / LAST / "state.json", lambda state: state.update(seconds=0.0)), None),
        (lambda run: alter_json(run / LAST / "state.json", lambda state: state.update(samples="")), "the ids of the"),
        (lambda run: alter_json(run / "log.jsonl", lambda line: line.update(loss=1.0), -4), "loss of update 5 differs"),
        (lambda run: alter_json(run / "log.jsonl", lambda line: line.update(norm=1.0)), "no two runs agree here"),
        (lambda run: alter_tensor(run / LAST / "model.safetensors", WEIGHT), f"{WEIGHT} of the weights differs"),
        (lambda run: alter_tensor(run / LAST / "training.safetensors", MOMENT), f"{MOMENT} of the moments of the"),
        (lambda run: alter_json(run / LAST / "state.json", lambda state: state.update(stale=9)), "stale of the state"),
    ],
)  # fmt: skip
def test_the_first_thing_that_differs_is_named(
    straight: Path, tmp_path: Path, alter: Callable[[Path], None], said: str | None
):
    shutil.copytree(straight, tmp_path / "run", symlinks=True)
    alter(tmp_path / "run")
    found = first_difference(straight / LAST, tmp_path / "run" / LAST, [(4, 3)])
    assert found is None if said is None else found is not None and said in found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recipe_is_proved_and_its_own_run_left_alone(tmp_path: Path, ranks: int):
    recipe = small_recipe(
        tmp_path, "run", "subwords.sampling=0.3", "data.weights=[1.5]", "data.micro_batch=100", "train.max_updates=2"
    )
    train(recipe, quiet=True)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    code, out, err = verify(tmp_path / "run", {"TMPDIR": str(tmp_path)}, ranks)
    assert (code, out.startswith("Resuming is exact: ")) == (0, True), out + err
    assert out.count("\n") == 1
    assert ("on 2 ranks" in out) == (ranks == 2)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()} == before
    assert not list(tmp_path.glob("diglot-verify-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("next(iter(optimizer.state.values()))['exp_avg'].add_(1e-3)", " of update "),
        ("state.update_of_epoch = 0", "the ids of the samples differ, and the "),
    ],
)
def test_a_resume_that_is_broken_is_found_out(tmp_path: Path, fault: str, said: str):
    # The faults are planted in every Python process that starts with this directory in its path.
    (tmp_path / "sitecustomize.py").write_text(
        "import diglot.run\n"
        "whole = diglot.run.restore\n"
        "def restore(path, model, optimizer, fingerprint):\n"
        "    state = whole(path, model, optimizer, fingerprint)\n"
        f"    {fault}\n"
        "    return state\n"
        "diglot.run.restore = restore\n"
    )
    (tmp_path / "r.toml").write_text(to_toml(small_recipe(tmp_path, "run")))
    code, out, err = verify(tmp_path / "r.toml", {"PYTHONPATH": str(tmp_path)})
    assert (code, out.startswith("Resuming is not exact: ")) == (1, True), out + err
    assert said in out
    assert "no two runs agree" not in out


def verify(recipe: Path, environment: dict[str, str], ranks: int = 1) -> tuple[int, str, str]:
    """The command as a user types it, for short: its trial takes a second."""
    script = recipe.parent / "short.py"
    script.write_text("import diglot.verify\ndiglot.verify.SECONDS = 1\nfrom diglot.cli import main\nmain()\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), "train", str(recipe), "--verify-resume", "--quiet"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr
