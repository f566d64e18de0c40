"""The frozen loop of `benchmarks/loop.py` with its own network, and with what is known to make it faster."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers import OUTPUT, Job, Step

LOOP = Path(__file__).parents[1] / "loop.py"
LOG = OUTPUT
NEEDS = "transformers"
NOTE = "bf16 autocast, explicit attention, and glibc told to keep freed memory"
SETTINGS = {
    f"{at_once} pieces at once": {"precision": "bf16", "attention": "explicit", "keep-memory": "", "at-once": at_once}
    for at_once in ("4096", "2048", "1024")
}


def command(job: Job, network: str = "plain") -> list[str]:
    """The command that trains."""
    net = job.network
    options: dict[str, object] = {
        "network": network,
        "layers": net.layers,
        "d-model": net.d_model,
        "d-ff": net.d_ff,
        "heads": net.heads,
        "norm": net.norm,
        "warmup": net.warmup_steps,
        "scale": net.scale,
        "pieces": job.corpus.num_pieces,
        "updates": job.updates,
        "threads": job.threads,
        **job.setting,
    }
    words = [str(job.python), str(LOOP), str(job.corpus.folder)]
    return words + [word for name, value in options.items() for word in (f"--{name}", str(value)) if word]


def read(line: str) -> Step | float | None:
    """A line of JSON."""
    if not line.startswith("{"):
        return None
    said = json.loads(line)
    return Step(said["update"], said["pieces"]) if "update" in said else said["valid_nll"]
