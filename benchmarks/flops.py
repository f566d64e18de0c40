"""What a target piece costs, and what the machine could do.

python benchmarks/flops.py      the peak of matrix products through torch, as JSON
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np


def flops_per_target_piece(
    src_lengths: Any, tgt_lengths: Any, num_pieces: int, d_model: int, d_ff: int, enc_layers: int, dec_layers: int
) -> float:
    """Of an update, by the formula of docs/speed.md: the products of forward and backward pass, of these sentences,
    with nothing for padding."""
    S, T = np.asarray(src_lengths, float), np.asarray(tgt_lengths, float)
    D, F, V = d_model, d_ff, num_pieces
    encoder = S * (8 * D * D + 4 * D * F) + 4 * S * S * D
    decoder = T * (12 * D * D + 4 * D * F) + S * 4 * D * D + 4 * T * T * D + 4 * S * T * D
    forward = enc_layers * encoder + dec_layers * decoder + 2 * T * D * V
    return float(3 * forward.sum() / T.sum())


def measure_peak(dtype: str, device: str = "cpu", seconds: float = 2.0) -> float:
    """Operations a second of the fastest square product of some sizes, through torch, with all of its threads."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = 0.0
    for size in (1024, 2048, 4096) if device == "cpu" else (4096, 8192, 16384):
        a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
        out = torch.empty_like(a)
        for _ in range(2):
            torch.mm(a, b, out=out)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            wait()
            begun = time.perf_counter()
            torch.mm(a, b, out=out)
            wait()
            best = max(best, 2 * size**3 / (time.perf_counter() - begun))
    return best


if __name__ == "__main__":
    print(json.dumps({dtype: measure_peak(dtype) for dtype in ("bfloat16", "float32")}))
