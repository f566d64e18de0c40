"""The frozen loop in fp32, as PyTorch comes."""

from __future__ import annotations

from benchmarks.peers.plain import LOG, command, read

__all__ = ["LOG", "NEEDS", "NOTE", "SETTINGS", "command", "read"]
NEEDS = "transformers"
NOTE = "fp32, fused attention"
SETTINGS = {"as it comes": {}}
