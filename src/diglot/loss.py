"""5.4, label smoothing: the cross-entropy with (1 - eps) one-hot + eps / V, in chunks of the logits.

The logits of an update are by far its largest tensor (target pieces times vocabulary), so they are never all
there at once: each chunk of rows is projected, turned into its part of the loss and of the gradients, and let go.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 8 << 20


def smoothed_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sums over all rows of the smoothed loss and of the plain negative log-likelihood, in nats.

    hidden (N, D), weight (V, D), target (N,). The first is to be minimized; the second, which carries no gradient,
    is what perplexity is made of. Divide by the number of pieces yourself: only the caller knows all of them.
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
            wanted = target[rows, None]
            log_p = F.linear(h[rows], w, b).log_softmax(-1, dtype=torch.float32)  # (n, V)
            nll_of_chunk = -log_p.gather(1, wanted).sum(dtype=torch.float64)
            nll += nll_of_chunk
            loss += (1 - smoothing) * nll_of_chunk
            if smoothing:  # sum over v of -q(v) log p(v), where q = (1 - eps) one-hot + eps / V
                loss -= smoothing / V * log_p.sum(-1).sum(dtype=torch.float64)
            if d_hidden is None or d_weight is None:
                continue
            d_logits = log_p.exp_()  # p - q
            if smoothing:
                d_logits -= smoothing / V
            d_logits.scatter_add_(1, wanted, torch.full_like(wanted, smoothing - 1, dtype=torch.float32))
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(dtype)
            d_hidden[rows] = d_logits @ w
            d_weight += d_logits.t() @ h[rows]
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        scaled = (None if d is None else d * grads[0].to(d.dtype) for d in ctx.saved_tensors)
        return (*scaled, None, None)
