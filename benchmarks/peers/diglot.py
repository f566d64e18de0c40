"""diglot itself, by its command."""

from __future__ import annotations

import json

from benchmarks.peers import Job, Step
from benchmarks.task import DROPOUT, SMOOTHING, SRC, TGT, UPDATE_PIECES

# padded pieces of both sides that go through the network at once
SETTINGS = {f"micro_batch {size:,}": {"micro_batch": str(size)} for size in (16384, 8192, 32768)}
LOG = "run/log.jsonl"
NEEDS = ""
NOTE = "bf16 where the processor has it"


def command(job: Job) -> list[str]:
    """The command that trains."""
    net, folder = job.network, job.corpus.folder
    values: dict[str, object] = {
        "model.d_model": net.d_model,
        "model.d_ff": net.d_ff,
        "model.num_heads": net.heads,
        "model.num_encoder_layers": net.layers,
        "model.num_decoder_layers": net.layers,
        "model.norm": net.norm,
        "model.dropout": DROPOUT,
        "subwords.model": folder / "subwords.model",
        "languages.src": SRC,
        "languages.tgt": TGT,
        "data.micro_batch": job.setting["micro_batch"],
        "train.label_smoothing": SMOOTHING,
        "train.update_pieces": UPDATE_PIECES,
        "train.warmup_steps": net.warmup_steps,
        "train.learning_rate_scale": net.scale,
        "train.max_updates": job.updates,
        "train.valid_every": job.updates,
        "train.patience": 0,
        "train.log_every": 1,
        "train.threads": job.threads,
        "train.device": "cpu",
        "train.out": job.folder / "run",
    }
    values |= {f"data.{part}{side}": folder / f"{name}.{language}"
               for part, name in (("", "train"), ("valid_", "valid"))
               for side, language in (("src", SRC), ("tgt", TGT))}  # fmt: skip
    return [str(job.python), "-m", "diglot", "train", "--quiet", *(f"{key}={value}" for key, value in values.items())]


def read(line: str) -> Step | float | None:
    """Its log counts the pieces of the whole run."""
    said = json.loads(line)
    if "valid_nll" in said:
        return said["valid_nll"]
    return Step(said["update"], total=said["pieces"]) if "pieces" in said else None
