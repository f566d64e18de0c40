"""5.4, label smoothing: the cross-entropy with (1 - eps) one-hot + eps / V, in chunks of the logits.

The logits of an update are by far its largest tensor (target pieces times vocabulary), so they are never all
there at once: each chunk of rows is projected, turned into its part of the loss and of the gradients, and let go.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2048  # rows of logits at a time


def smoothed_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sums over all rows of the smoothed loss and of the plain negative log-likelihood, in nats.

    hidden (N, D), weight (V, D), target (N,). The first is to be minimized; the second, which carries no gradient,
    is what perplexity is made of. Divide by the number of pieces yourself: only the caller knows all of them.
    """
    return _ProjectedLoss.apply(hidden, weight, bias, target, smoothing)  # type: ignore[no-any-return]


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        needs_grad = any(ctx.needs_input_grad)
        loss = hidden.new_zeros((), dtype=torch.float64)
        nll = hidden.new_zeros((), dtype=torch.float64)
        d_hidden = torch.empty_like(hidden) if needs_grad else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_grad and bias is not None else None
        uniform = smoothing / len(weight)
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            logits = F.linear(hidden[rows], weight, bias).float()  # (n, V)
            log_z = logits.logsumexp(-1)
            at_target = logits.gather(1, target[rows, None])[:, 0]
            chunk_nll = (log_z - at_target).sum(dtype=torch.float64)
            nll += chunk_nll
            if smoothing:  # sum_v q(v) (log_z - logit(v)), with q = (1 - eps) one-hot + eps / V
                to_all = len(weight) * log_z - logits.sum(-1)
                loss += (1 - smoothing) * chunk_nll + uniform * to_all.sum(dtype=torch.float64)
            else:
                loss += chunk_nll
            if d_hidden is None or d_weight is None:
                continue
            d_logits = logits.sub_(log_z[:, None]).exp_()  # the softmax, less q
            if smoothing:
                d_logits -= uniform
            d_logits[torch.arange(len(d_logits), device=d_logits.device), target[rows]] -= 1 - smoothing
            d_hidden[rows] = d_logits @ weight
            d_weight += d_logits.t() @ hidden[rows]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        scale = grads[0]
        return (
            d_hidden * scale.to(d_hidden.dtype),
            d_weight * scale.to(d_weight.dtype),
            None if d_bias is None else d_bias * scale.to(d_bias.dtype),
            None,
            None,
        )
