"""How much of a GPU diglot's training step uses: `base` and `big` in one call, in a few minutes.

    python -m benchmarks.gpu                                      on one CUDA GPU
    python -m benchmarks.gpu --device cpu --preset tiny --seconds 2 --update-pieces 2048    does it run at all?

The step is the one that `diglot train` takes, on random pieces in sentences of several lengths, so nothing waits for
text. The share is of a bf16 product's measured peak, and of the data sheet's where the GPU is known. UNMEASURED: this
has not been run on a GPU yet, on a CPU alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.flops import flops_per_target_piece, measure_peak
from diglot.config import Recipe, load_recipe
from diglot.loader import MicroBatch, Place, Update
from diglot.model import Transformer
from diglot.parallel import World
from diglot.progress import Reporter
from diglot.run import Job
from diglot.schedule import lrate, make_optimizer
from diglot.training import gradients, keep_freed_memory, repeat_exactly

NUM_PIECES = 37_000  # of the paper's English-German vocabulary
UPDATE_PIECES = 25_000  # target pieces of an update, and about as many source pieces: the paper's 5.1
LENGTHS = (16, 24, 32, 48, 64)  # a micro-batch holds sentences of one of them
SHEET = {  # dense bf16, operations a second, by NVIDIA's data sheets
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip
WARM_UPDATES = 5


def main() -> None:
    """Measure the peak, then each preset."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preset", nargs="+", default=["base", "big"])
    parser.add_argument("--seconds", type=float, default=60, help="measured of each, after a warm-up")
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="padded pieces at once; 0: half, then all of an update"
    )
    parser.add_argument("--update-pieces", type=int, default=UPDATE_PIECES)
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    peak = measure_peak("bfloat16", args.device)
    sheet = next((value for key, value in SHEET.items() if key in name), None)
    said = f", {sheet / 1e12:,.0f} by its data sheet" if sheet else ""
    print(f"{name}, torch {torch.__version__}: {peak / 1e12:,.1f} TFLOP/s in a bf16 product{said}", flush=True)
    both = 2 * args.update_pieces
    for preset, size in itertools.product(args.preset, [args.micro_batch] if args.micro_batch else [both // 2, both]):
        result = measure(preset, args.device, size, args.update_pieces, args.seconds)
        result["mfu"] = result["flops"] / peak
        if sheet:
            result["mfu_of_data_sheet"] = result["flops"] / sheet
        print(json.dumps({"preset": preset, "micro_batch": size, **result}), flush=True)


def measure(preset: str, device: str, micro_batch: int, update_pieces: int, seconds: float) -> dict[str, float]:
    """Target pieces a second of the training step."""
    recipe = load_recipe(None, preset, (f"data.micro_batch={micro_batch}", "train.precision=bf16"))
    job = Job(recipe, Path(), World(), device, True, Reporter(quiet=True))
    keep_freed_memory()
    repeat_exactly(device)
    torch.manual_seed(1)
    model = Transformer(recipe.model, NUM_PIECES, NUM_PIECES).to(device)
    optimizer = make_optimizer(model)
    waiting = [draw_update(number, micro_batch, update_pieces) for number in range(8)]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    pieces = num_updates = 0
    begun, loss = math.inf, math.nan
    for number in itertools.count():
        if number == WARM_UPDATES:
            wait()
            begun, pieces = time.monotonic(), 0
        update = waiting[number % len(waiting)]
        loss = one_update(job, model, optimizer, update, number + 1)
        pieces += update.num_pieces
        if time.monotonic() - begun > seconds:
            wait()
            num_updates = number + 1 - WARM_UPDATES
            break
    speed = pieces / (time.monotonic() - begun)
    lengths = np.concatenate(
        [np.full(len(m.src), m.src.shape[1]) for m in itertools.chain(*(u.micro_batches for u in waiting))]
    )
    config = recipe.model
    cost = flops_per_target_piece(lengths, lengths, NUM_PIECES, config.d_model, config.d_ff,
                                  config.num_encoder_layers, config.num_decoder_layers)  # fmt: skip
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"pieces_per_second": round(speed), "flops": speed * cost, "updates": num_updates, "loss": loss,
            "memory": memory}  # fmt: skip


def one_update(job: Job, model: Transformer, optimizer: torch.optim.Optimizer, update: Update, number: int) -> float:
    """As `diglot.training.train` makes one; the loss of a piece is returned."""
    recipe: Recipe = job.recipe
    sums = gradients(job, model, model, update)
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.clip_norm or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = lrate(number, recipe.model.d_model, recipe.train.warmup_steps, recipe.train.learning_rate_scale)
    optimizer.step()
    optimizer.zero_grad()
    return sums.loss / sums.pieces


def draw_update(number: int, micro_batch: int, update_pieces: int) -> Update:
    """Random pieces, nothing padded, both sides of a length: micro-batches until the update is full."""
    rng = np.random.default_rng(number)
    micros: list[MicroBatch] = []
    left = update_pieces
    while left > 0:
        length = int(rng.choice(LENGTHS))
        rows = max(1, min(micro_batch // (2 * length), round(left / length)))
        src, tgt = (rng.integers(100, NUM_PIECES, (rows, length)) for _ in range(2))
        counts, keys = np.full(rows, length), rng.integers(1 << 62, size=rows)
        micros.append(MicroBatch(src, counts, tgt, counts, keys))
        left -= rows * length
    return Update(Place(number, 0, number, np.arange(0)), micros, sum(micro.tgt.size for micro in micros))


if __name__ == "__main__":
    main()
