"""The benchmarks: the formula of what a piece costs, the frozen loop, and the harness, run on diglot itself."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import table
from benchmarks.flops import flops_per_target_piece
from benchmarks.loop import Plain, cut, loss_of
from benchmarks.measure import Seen
from benchmarks.peers import Step
from benchmarks.task import NETWORKS
from diglot import kernels
from diglot.batching import pad
from diglot.config import ModelConfig
from diglot.loader import MicroBatch
from diglot.loss import smoothed_loss
from diglot.model import Transformer
from diglot.packed import PackedTransformer
from diglot.schedule import make_optimizer

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("num_pairs", [1, 3])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_formula_is_what_pytorch_counts(norm: str, num_pairs: int):
    S, T, V, D, F = 7, 5, 40, 16, 24
    torch.manual_seed(1)
    network = Plain(V, layers=2, d_model=D, d_ff=F, heads=4, norm=norm, is_fused=False)
    rng = np.random.default_rng(1)
    pairs = [(rng.integers(2, V, S), rng.integers(2, V, T)) for _ in range(num_pairs)]
    with FlopCounterMode(display=False) as counter:
        loss_of(network, pairs, smoothing=0.1).backward()
    lengths = [S] * num_pairs, [T] * num_pairs
    assert counter.get_total_flops() == num_pairs * T * flops_per_target_piece(*lengths, V, D, F, 2, 2)


def test_the_frozen_loop_does_not_see_later_pieces_or_padding():
    torch.manual_seed(1)
    network = Plain(40, layers=1, d_model=16, d_ff=24, heads=4, norm="pre", is_fused=True).eval()
    src, tgt = torch.randint(2, 40, (1, 6)), torch.randint(2, 40, (1, 5))
    logits = network(src, tgt)
    other = torch.cat((tgt[:, :3], tgt.flip(1)[:, :2]), dim=1)
    padded = torch.nn.functional.pad(src, (0, 4))
    torch.testing.assert_close(network(padded, other)[:, :4], logits[:, :4])


def test_the_warm_up_is_left_out_of_the_speed():
    """Ten pieces a second for a minute, after a start at which nobody should look."""
    for step in (Step(1, pieces=5), Step(1, total=5), Step(1, speed=10)):
        seen = Seen()
        seen.add(40.0, step)
        for number in range(2, 122):
            now = 40 + number / 2
            said = Step(number, pieces=5) if step.pieces else Step(number, total=5 * number)
            seen.add(now, Step(number, speed=10) if step.speed else said)
        assert seen.warm[0][0] == 55
        assert seen.speed == pytest.approx(10)
        assert seen.pieces_per_update == pytest.approx(5)


@pytest.mark.slow
@pytest.mark.skipif(not kernels.are_there(), reason="diglot was installed without a compiler")
def test_a_step_stays_well_ahead_of_the_frozen_loop():
    """The guard against growing slow: the same pairs through both, in turns, so that a busy machine slows both down."""
    size, num_pieces = NETWORKS["tiny"], 8000
    sizes = {"d_model": size.d_model, "d_ff": size.d_ff}
    rng = np.random.default_rng(1)
    pairs = [tuple(rng.integers(2, num_pieces, rng.integers(6, 30)) for _ in "st") for _ in range(220)]
    torch.manual_seed(1)
    plain = Plain(num_pieces, size.layers, **sizes, heads=size.heads, norm=size.norm, is_fused=False)
    config = ModelConfig(**sizes, num_heads=size.heads, num_encoder_layers=size.layers,
                         num_decoder_layers=size.layers, norm=size.norm, dropout=0.1)  # fmt: skip
    model = Transformer(config, num_pieces, num_pieces).train()
    network, batch = PackedTransformer(model, torch.bfloat16), cut(pairs, 10_000)[0]
    src, tgt = (pad([pair[side].tolist() for pair in batch], 0) for side in (0, 1))
    micro = MicroBatch(*src, *tgt, np.arange(len(batch)))
    optimizers = make_optimizer(plain), make_optimizer(model)

    def of_plain() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(plain, batch, 0.1)
        loss.backward()

    def of_diglot() -> None:
        hidden, wanted = micro.through(network, "cpu", True)
        smoothed_loss(hidden, model.output.weight, None, wanted, 0.1)[0].backward()

    ratios: list[float] = []
    for _ in range(12):
        seconds: list[float] = []
        for step, optimizer in zip((of_plain, of_diglot), optimizers, strict=True):
            begun = time.perf_counter()
            step()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begun)
        ratios.append(seconds[0] / seconds[1])
    assert statistics.median(ratios[2:]) > 1.6, ratios


@pytest.mark.slow
def test_diglot_is_measured_and_put_into_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--network",
        "smoke",
        "--only",
        "diglot",
        "--rounds",
        "1",
        "--tune",
        "0",
    ]
    command += ["--seconds", "1", "--epochs", "0.1", "--work", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    result = json.loads((tmp_path / "smoke-by-rule-8000.json").read_text())
    row = result["systems"]["diglot"]
    assert row["median"] > 0
    assert row["memory"] > 10e6
    assert row["pieces_per_update"] == pytest.approx(4096, rel=0.1)
    assert 0 < row["long"]["nll"] < 10
    assert set(result["loader"]) == {"1", "2"}
    assert "| diglot | " in said
    docs = tmp_path / "speed.md"
    docs.write_text("before\n<!-- begin of smoke -->\nold\n<!-- end of smoke -->\nafter\n")
    monkeypatch.setattr(table, "DOCS", docs)
    table.write_into_docs([result])
    assert docs.read_text().startswith("before\n<!-- begin of smoke -->\n`smoke` on by-rule-8000")
    assert "old" not in docs.read_text()


@pytest.mark.slow
def test_the_step_is_measured_without_a_gpu_too():
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--preset", "tiny", "--seconds", "1"]
    command += ["--update-pieces", "128", "--micro-batch", "256"]
    *_, last = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert json.loads(last)["pieces_per_second"] > 0
