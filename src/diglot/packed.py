"""`model.Transformer` in training on a CPU: the same function and the same gradients, several times as fast.

Rows are packed: there is no padding, and whatever happens between two matrix products is one pass of a native kernel.
A sub-layer computes its output and returns with it how a gradient goes back through it. What is kept is in `dtype`, a
sum within a kernel or a product in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diglot import kernels
from diglot.config import ModelConfig
from diglot.kernels import Look, Rows
from diglot.model import (
    DecoderLayer,
    Dropout,
    Embedding,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    PositionalEncoding,
    Residual,
    Transformer,
)

ROWS = 256  # of which the number of rows is a multiple, so that few shapes recur

Ids = NDArray[np.int64]
Backward = Callable[[Tensor], Tensor]  # from the gradient of an output to that of the input
Step = tuple[Tensor, Backward]
# the same within a residual connection: the gradient of the input is added to what comes by the other way, if it does
BackwardOnto = Callable[[Tensor, Tensor | None], Tensor]
Sublayer = Callable[[Tensor], tuple[Tensor, BackwardOnto]]


@dataclass(frozen=True)
class Packed:
    """A micro-batch in packed rows."""

    src: Tensor  # (N,) pieces
    src_rows: Rows
    inputs: Tensor  # (M,) the target's, shifted right: -1 where a sentence begins
    tgt: Tensor  # (M,) -1 in rows that fill up
    tgt_rows: Rows


def pack(src: Ids, src_lengths: Ids, tgt: Ids, tgt_lengths: Ids, keys: Ids) -> Packed:
    """From sentences filled up to one length, (B, S) and (B, T)."""
    own = tgt_lengths > 0  # the others only fill up a micro-batch
    src_ids, src_rows = pack_side(src[own], src_lengths[own], keys[own])
    tgt_ids, tgt_rows = pack_side(tgt[own], tgt_lengths[own], keys[own])
    inputs = tgt_ids.roll(1)
    inputs[tgt_rows.starts[:-1]] = -1
    return Packed(src_ids, src_rows, inputs, tgt_ids, tgt_rows)


def pack_side(padded: Ids, lengths: Ids, keys: Ids) -> tuple[Tensor, Rows]:
    """The pieces of a side, and where they belong."""
    inside = cast("NDArray[np.bool_]", np.arange(padded.shape[1]) < lengths[:, None])
    samples, places = np.nonzero(inside)
    more = -len(places) % ROWS
    starts = np.concatenate(([0], np.cumsum(inside.sum(1))))
    ids = np.pad(padded[inside], (0, more), constant_values=-1)
    rows = starts, keys, np.pad(keys[samples], (0, more)), np.pad(places, (0, more))
    return torch.from_numpy(ids), Rows(*(torch.from_numpy(array) for array in rows), num=len(places))


def why_not(config: ModelConfig) -> str:
    """Why the kernels cannot train a network, if they cannot."""
    if config.d_model % kernels.VECTOR or config.d_ff % kernels.VECTOR:
        return f"they need a d_model and a d_ff that are multiples of {kernels.VECTOR}"
    return kernels.why_not()


class Gradients:
    """Those of the weights, in fp32, as one pass finds them."""

    def __init__(self) -> None:
        self.found: dict[Tensor, Tensor] = {}

    def add(self, weights: Sequence[Tensor], gradient: Tensor) -> None:
        """That of weights which were used as one, one below the other."""
        parts = torch.split(gradient, [len(weight) for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            self.found[weight] = part.float()

    def of(self, weight: Tensor) -> Tensor:
        """To be added to in place."""
        if weight not in self.found:
            self.found[weight] = torch.zeros_like(weight)
        return self.found[weight]


class _Pass(torch.autograd.Function):
    """The whole network as one step of autograd, which so knows of the weights alone."""

    @staticmethod
    def forward(ctx: Any, network: PackedTransformer, batch: Packed, *weights: nn.Parameter) -> Tensor:
        ctx.weights, ctx.gradients = weights, Gradients()
        hidden, ctx.back = network.run(batch, ctx.gradients)
        return hidden

    @staticmethod
    def backward(ctx: Any, *d_hidden: Tensor) -> tuple[Tensor | None, ...]:
        back, ctx.back = ctx.back, None
        back(d_hidden[0].contiguous())
        return (None, None, *(ctx.gradients.found.pop(weight, None) for weight in ctx.weights))


class PackedTransformer(nn.Module):
    """A network's pass in training; its parameters are the network's own."""

    def __init__(self, model: Transformer, dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = model, dtype
        self.weights = list(model.parameters())
        self.numbers = {dropout: number for number, dropout in enumerate(model.dropouts)}

    def forward(self, batch: Packed) -> Tensor:
        """Hidden states (M, D): the one of a row predicts batch.tgt of that row."""
        return cast(Tensor, _Pass.apply(self, batch, *self.weights))

    def run(self, batch: Packed, grads: Gradients) -> Step:
        """Forward, and the way back, on which the gradients of the weights are found."""
        model, src, tgt = self.model, batch.src_rows, batch.tgt_rows
        x, back_src = self.embed(model.src_embedding, model.src_positions, batch.src, src, grads)
        encoded = [back_src]
        for layer in model.encoder.layers:
            x, back = self.encoder_layer(layer, x, src, grads)
            encoded.append(back)
        memory, back = self.stack_norm(model.encoder.norm, x, src, grads)
        encoded.append(back)
        d_memory = torch.zeros_like(memory)
        y, back_tgt = self.embed(model.tgt_embedding, model.tgt_positions, batch.inputs, tgt, grads)
        decoded = [back_tgt]
        for layer in model.decoder.layers:
            y, back = self.decoder_layer(layer, y, tgt, Memory(memory, src, d_memory), grads)
            decoded.append(back)
        hidden, back = self.stack_norm(model.decoder.norm, y, tgt, grads)
        decoded.append(back)

        def backward(gradient: Tensor) -> Tensor:
            while decoded:
                gradient = decoded.pop()(gradient)
            gradient = d_memory
            while encoded:
                gradient = encoded.pop()(gradient)
            return gradient

        return hidden, backward

    # --------------------------------------------------------------- 3.1

    def encoder_layer(self, layer: EncoderLayer, x: Tensor, rows: Rows, grads: Gradients) -> Step:
        """Self-attention and the feed-forward network."""
        look_around = partial(self.self_attention, layer.self_attention, rows=rows, is_causal=False, grads=grads)
        feed_forward = partial(self.feed_forward, layer.feed_forward, rows=rows, grads=grads)
        x, back_1 = self.residual(layer.residual_1, x, rows, grads, look_around)
        x, back_2 = self.residual(layer.residual_2, x, rows, grads, feed_forward)
        return x, lambda dx: back_1(back_2(dx))

    def decoder_layer(self, layer: DecoderLayer, y: Tensor, rows: Rows, memory: Memory, grads: Gradients) -> Step:
        """Masked self-attention, attention over the memory, the feed-forward network."""
        look_back = partial(self.self_attention, layer.self_attention, rows=rows, is_causal=True, grads=grads)
        look_at_source = partial(self.cross_attention, layer.cross_attention, rows=rows, memory=memory, grads=grads)
        feed_forward = partial(self.feed_forward, layer.feed_forward, rows=rows, grads=grads)
        y, back_1 = self.residual(layer.residual_1, y, rows, grads, look_back)
        y, back_2 = self.residual(layer.residual_2, y, rows, grads, look_at_source)
        y, back_3 = self.residual(layer.residual_3, y, rows, grads, feed_forward)
        return y, lambda dy: back_1(back_2(back_3(dy)))

    def residual(self, module: Residual, x: Tensor, rows: Rows, grads: Gradients, sublayer: Sublayer) -> Step:
        """Norm(x + Dropout(Sublayer(x))), or x + Dropout(Sublayer(Norm(x)))."""
        drop = self.drop(module.dropout)
        if not module.is_post:
            n, back_norm = self.norm(module.norm, x, rows, grads)
            o, back_sublayer = sublayer(n)
            y = kernels.add(x, o, rows, drop)
            return y, lambda dy: back_norm(back_sublayer(kernels.add_backward(dy, rows, drop), None), dy)
        o, back_sublayer = sublayer(x)
        gain, bias = module.norm.weight, module.norm.bias
        y, stats = kernels.add_norm(x, o, gain, bias, module.norm.eps, rows, drop)

        def backward(dy: Tensor) -> Tensor:
            ds, d_o, d_gain, d_bias = kernels.add_norm_backward(dy, o, None, gain, stats, rows, drop)
            grads.add((gain,), d_gain)
            grads.add((bias,), d_bias)
            return back_sublayer(d_o, ds)

        return y, backward

    def norm(self, module: nn.LayerNorm, x: Tensor, rows: Rows, grads: Gradients) -> tuple[Tensor, BackwardOnto]:
        """A norm of its own."""
        gain, bias = module.weight, module.bias
        y, stats = kernels.add_norm(x, None, gain, bias, module.eps, rows, NO_DROP)

        def backward(dy: Tensor, onto: Tensor | None) -> Tensor:
            dx, _, d_gain, d_bias = kernels.add_norm_backward(dy, x, onto, gain, stats, rows, NO_DROP)
            grads.add((gain,), d_gain)
            grads.add((bias,), d_bias)
            return dx

        return y, backward

    def stack_norm(self, module: nn.Module, x: Tensor, rows: Rows, grads: Gradients) -> Step:
        """The norm at the end of a pre-norm stack."""
        if not isinstance(module, nn.LayerNorm):
            return x, lambda dx: dx
        y, back = self.norm(module, x, rows, grads)
        return y, lambda dy: back(dy, None)

    # --------------------------------------------------------------- 3.2

    def self_attention(
        self, module: MultiHeadAttention, x: Tensor, rows: Rows, is_causal: bool, grads: Gradients
    ) -> tuple[Tensor, BackwardOnto]:
        """The projections to queries, keys and values are one product."""
        look = self.look(module, rows, rows, is_causal)
        qkv, back_qkv = self.linear((module.w_q, module.w_k, module.w_v), x, grads)
        q, k, v = columns_of(qkv, module)
        out = kernels.attend(look, (q, k, v))
        y, back_out = self.linear((module.w_o,), out, grads)

        def backward(dy: Tensor, onto: Tensor | None) -> Tensor:
            d_qkv = torch.empty_like(qkv)
            dq, dk, dv = columns_of(d_qkv, module)
            kernels.attend_backward(look, back_out(dy, None), (q, k, v), (dq, dk, dv))
            return back_qkv(d_qkv, onto)

        return y, backward

    def cross_attention(
        self, module: MultiHeadAttention, x: Tensor, rows: Rows, memory: Memory, grads: Gradients
    ) -> tuple[Tensor, BackwardOnto]:
        """Keys and values are of the memory, and so is their gradient."""
        look = self.look(module, rows, memory.rows, False)
        q, back_q = self.linear((module.w_q,), x, grads)
        kv, back_kv = self.linear((module.w_k, module.w_v), memory.states, grads)
        k, v = columns_of(kv, module)
        out = kernels.attend(look, (q, k, v))
        y, back_out = self.linear((module.w_o,), out, grads)

        def backward(dy: Tensor, onto: Tensor | None) -> Tensor:
            dq, d_kv = torch.empty_like(q), torch.empty_like(kv)
            dk, dv = columns_of(d_kv, module)
            kernels.attend_backward(look, back_out(dy, None), (q, k, v), (dq, dk, dv))
            back_kv(d_kv, memory.gradient)
            return back_q(dq, onto)

        return y, backward

    def look(self, module: MultiHeadAttention, rows: Rows, memory: Rows, is_causal: bool) -> Look:
        """What its heads do, their widths by the shapes of its projections."""
        num = module.num_heads
        keys, values = module.w_k.out_features // num, module.w_v.out_features // num
        return Look(num, keys, values, rows, memory, is_causal, self.drop(module.dropout))

    # --------------------------------------------------------------- 3.3

    def feed_forward(self, module: FeedForward, x: Tensor, rows: Rows, grads: Gradients) -> tuple[Tensor, BackwardOnto]:
        """Two linear transformations with the activation between them."""
        kind, drop = self.model.config.activation, self.drop(module.dropout)
        inner, back_1 = self.linear((module.w_1,), x, grads)
        active = kernels.activation(kind, inner, rows, drop)
        y, back_2 = self.linear((module.w_2,), active, grads)

        def backward(dy: Tensor, onto: Tensor | None) -> Tensor:
            d_active = back_2(dy, None)
            d_inner = kernels.activation_backward(kind, inner, d_active, rows, drop)
            return back_1(d_inner, onto)

        return y, backward

    def linear(self, modules: tuple[nn.Linear, ...], x: Tensor, grads: Gradients) -> tuple[Tensor, BackwardOnto]:
        """x W^T + b, for several matrices, one below the other, at once."""
        weights = [module.weight for module in modules]
        biases = [bias for module in modules for name, bias in module.named_parameters() if name == "bias"]
        w = self.copy(weights)
        y = torch.addmm(self.copy(biases), x, w.t()) if biases else x @ w.t()

        def backward(dy: Tensor, onto: Tensor | None) -> Tensor:
            grads.add(weights, dy.t() @ x)
            if biases:
                grads.add(biases, kernels.column_sums(dy))
            return dy @ w if onto is None else onto.addmm_(dy, w)

        return y, backward

    # --------------------------------------------------------------- 3.4, 3.5

    def embed(
        self, module: Embedding, positions: PositionalEncoding, pieces: Tensor, rows: Rows, grads: Gradients
    ) -> Step:
        """Pieces and their positions to vectors."""
        weight, drop, scale = module.weight, self.drop(positions.dropout), math.sqrt(module.weight.size(1))
        if int(pieces.max()) >= len(weight):
            raise IndexError(f"there is no piece {int(pieces.max())} among {len(weight)}")
        table = positions.upto(int(rows.places.max()) + 1)
        x = kernels.embed(pieces, weight, table, scale, self.dtype, rows, drop)

        def backward(dx: Tensor) -> Tensor:
            d_positions = grads.of(table) if isinstance(table, nn.Parameter) else None
            kernels.embed_backward(pieces, dx, grads.of(weight), d_positions, scale, rows, drop)
            return dx

        return x, backward

    # --------------------------------------------------------------- what the parts share

    def drop(self, module: Dropout) -> kernels.Drop:
        """The network's dropout of that place."""
        return kernels.drop(module.p if self.model.training else 0.0, self.numbers[module])

    def copy(self, weights: Sequence[Tensor]) -> Tensor:
        """Weights in the type of the products, one below the other."""
        copies = [weight.detach().to(self.dtype) for weight in weights]
        return copies[0] if len(copies) == 1 else torch.cat(copies)


@dataclass(frozen=True)
class Memory:
    """What the encoder has made of the source, and the gradient that the decoder's layers add up for it."""

    states: Tensor
    rows: Rows
    gradient: Tensor


NO_DROP = kernels.drop(0.0, 0)


def columns_of(rows: Tensor, module: MultiHeadAttention) -> tuple[Tensor, ...]:
    """Queries, keys and values that lie side by side, or keys and values."""
    keys, values = module.w_k.out_features, module.w_v.out_features
    return torch.split(rows, [keys] * ((rows.size(1) - values) // keys) + [values], dim=1)
