"""5.3: the optimizer and its learning rate."""

from __future__ import annotations

import torch
from torch import nn

BETAS = (0.9, 0.98)
EPSILON = 1e-9


def lrate(step: int, d_model: int, warmup_steps: int = 4000, scale: float = 1.0) -> float:
    """Equation (3): d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), for steps from 1.

    >>> f"{lrate(4000, 512):.2e} {lrate(4000, 1024):.2e}"
    '6.99e-04 4.94e-04'
    """
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def make_optimizer(model: nn.Module) -> torch.optim.Adam:
    """Adam as the paper sets it; the learning rate is set before each update."""
    return torch.optim.Adam(model.parameters(), lr=0.0, betas=BETAS, eps=EPSILON, fused=True)
