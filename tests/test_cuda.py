"""What only a GPU can show: it trains there too, repeats and resumes exactly, and agrees with the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import diglot
from diglot import checkpoint
from diglot.config import Recipe
from diglot.training import train
from training_runs import small_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU here")
STEP = Path("step-000006", checkpoint.WEIGHTS)


def gpu_recipe(directory: Path, out: str, *words: str) -> Recipe:
    return small_recipe(directory, out, "train.device=cuda", "model.dropout=0.2", *words)


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_repeats_and_resumes_bit_for_bit(tmp_path: Path, precision: str):
    words = (f"train.precision={precision}", "model.d_model=128", "subwords.sampling=0.1")
    for out in ("one", "two"):
        train(gpu_recipe(tmp_path, out, *words), quiet=True)
    train(gpu_recipe(tmp_path, "three", *words, "train.max_updates=3"), quiet=True)
    train(gpu_recipe(tmp_path, "three", *words), quiet=True)
    for out in ("two", "three"):
        assert (tmp_path / out / STEP).read_bytes() == (tmp_path / "one" / STEP).read_bytes()
        assert losses(tmp_path / out) == losses(tmp_path / "one")


def test_cpu_and_gpu_train_the_same_network(tmp_path: Path):
    """Dropout is on: what it drops follows from the samples, not from the device."""
    train(gpu_recipe(tmp_path, "gpu", "train.precision=fp32"), quiet=True)
    train(gpu_recipe(tmp_path, "cpu", "train.precision=fp32", "train.device=cpu"), quiet=True)
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_under_torchrun_is_one_process(tmp_path: Path, strategy: str):
    train(gpu_recipe(tmp_path, "alone", "train.precision=fp32"), quiet=True)
    recipe = tmp_path / "alone" / "config.toml"
    out = f"train.out={json.dumps(str(tmp_path / 'ranks'))}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "diglot"]
    subprocess.run([*command, "train", str(recipe), out, f"train.strategy={strategy}"], check=True, timeout=300)
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.fixture
def little_memory():
    """Of the GPU, 300 MiB."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (300 << 20) / total))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_micro_batch_is_found_by_trying(tmp_path: Path, little_memory: None, capfd: pytest.CaptureFixture[str]):
    words = ("data.micro_batch=auto", "train.update_pieces=200000", "subwords.size=400", "model.d_model=256")
    summary = train(gpu_recipe(tmp_path, "run", *words), quiet=False)
    assert summary.skipped == 0
    state = json.loads((tmp_path / "run" / "step-000006" / "state.json").read_text())
    assert 512 <= state["micro_batch"] < 100_000
    assert state["memory_splits"] == 0


def test_where_memory_runs_out_the_update_goes_on_in_parts(tmp_path: Path, little_memory: None):
    words = ("train.update_pieces=4000", "train.precision=fp32", "model.d_model=256", "model.d_ff=1024")
    train(gpu_recipe(tmp_path, "large", *words, "data.micro_batch=1000000"), quiet=True)
    state = json.loads((tmp_path / "large" / "step-000006" / "state.json").read_text())
    assert state["memory_splits"] > 0
    train(gpu_recipe(tmp_path, "small", *words, "data.micro_batch=400"), quiet=True)
    assert losses(tmp_path / "large") == pytest.approx(losses(tmp_path / "small"), rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["beam", "greedy"])
def test_batch_mates_change_no_translation(tmp_path: Path, precision: str, method: str):
    summary = train(gpu_recipe(tmp_path, "run", "train.max_updates=60", "train.valid_every=60"), quiet=True)
    model = diglot.load(summary.model, device="cuda", precision=precision)
    lines = (tmp_path / "train.en").read_text().splitlines()[:64]
    together = model.translate(lines, method=method)
    assert [model.translate([line], method=method)[0] for line in lines] == together
    assert model.translate(lines[::-1], method=method)[::-1] == together
