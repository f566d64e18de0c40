"""The MarianMT of transformers in the frozen loop of `benchmarks/loop.py`: transformers brings no loop for it."""

from __future__ import annotations

from benchmarks.peers import Job, plain
from benchmarks.peers.plain import LOG, read

__all__ = ["LOG", "NEEDS", "NOTE", "SETTINGS", "command", "read"]
NEEDS = "transformers"
NOTE = "post-norm alone, with biases in attention"
SETTINGS = {
    f"{precision}, {attention}{', memory kept' if keep else ''}": {
        "precision": precision,
        "attention": attention,
        **({"keep-memory": ""} if keep else {}),
    }
    for precision, attention, keep in (
        ("bf16", "explicit", True),
        ("bf16", "explicit", False),
        ("bf16", "fused", False),
        ("fp32", "fused", False),
    )
}


def command(job: Job) -> list[str]:
    """The command that trains."""
    return plain.command(job, "marian")
