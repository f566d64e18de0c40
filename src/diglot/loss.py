"""5.4, label smoothing: the cross-entropy with (1 - eps) one-hot + eps / V, in chunks of the logits.

The logits of an update are by far its largest tensor (target pieces times vocabulary), so they are never all
there at once: each chunk of rows is projected, turned into its part of the loss and of the gradients, and let go.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from diglot import kernels

CHUNK_BYTES = 32 << 20


def smoothed_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sums over all rows of the smoothed loss and of the plain negative log-likelihood, in nats.

    hidden (N, D), weight (V, D), target (N,), which is negative in rows that count for nothing. The first is to be
    minimized; the second, which carries no gradient, is what perplexity is made of. Divide by the number of pieces
    yourself: only the caller knows all of them.
    """
    return cast("tuple[Tensor, Tensor]", _ProjectedLoss.apply(hidden, weight, bias, target, smoothing))


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        needs_grad = any(ctx.needs_input_grad)
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        h, w = hidden.to(dtype), weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        V = len(weight)
        loss = hidden.new_zeros((), dtype=torch.float64)
        nll = hidden.new_zeros((), dtype=torch.float64)
        d_hidden = torch.empty_like(hidden) if needs_grad else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_grad and bias is not None else None
        chunk = max(1, CHUNK_BYTES // (4 * V))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = F.linear(h[rows], w, b)
            of_chunk, d_logits = losses_and_gradient(logits, target[rows], smoothing)
            loss += of_chunk[0]
            nll += of_chunk[1]
            if d_hidden is None or d_weight is None:
                continue
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=torch.float32)
            d_hidden[rows] = d_logits @ w
            d_weight += d_logits.t() @ h[rows]
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        scaled = (
            None if d is None else d * grads[0] for d in ctx.saved_tensors
        )  # of no dimension, so it is not rounded
        return (*scaled, None, None)


def losses_and_gradient(logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The sums of the smoothed loss and of the negative log-likelihood of some rows, and the gradient of the first,
    in the type of the logits, whose place it may take."""
    if logits.device.type == "cpu" and kernels.are_there() and logits.dtype in (torch.float32, torch.bfloat16):
        if int(target.max()) >= logits.size(1):
            raise IndexError(f"there is no piece {int(target.max())} among {logits.size(1)}")
        return kernels.loss(logits, target, smoothing).sum(0), logits
    V = logits.size(1)
    counts = (target >= 0)[:, None]
    wanted = target.clamp(min=0)[:, None]
    log_p = logits.log_softmax(-1, dtype=torch.float32)  # (n, V)
    nll = -(log_p.gather(1, wanted) * counts).sum(dtype=torch.float64)
    loss = (1 - smoothing) * nll
    if smoothing:  # the sum over v of -q(v) log p(v), where q = (1 - eps) one-hot + eps / V
        loss = loss - smoothing / V * (log_p.sum(-1, keepdim=True) * counts).sum(dtype=torch.float64)
    d_logits = log_p.exp_().sub_(smoothing / V)  # p - q
    d_logits.scatter_add_(1, wanted, torch.full_like(wanted, smoothing - 1, dtype=torch.float32))
    return torch.stack((loss, nll)), d_logits.mul_(counts).to(logits.dtype)
