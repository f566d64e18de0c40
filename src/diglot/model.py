"""The Transformer: section 3 of "Attention Is All You Need" (arXiv 1706.03762v7), top to bottom in its order.

Axes:  B batch, S source, T target, D d_model, H heads, K width of a head, F d_ff, V pieces.
Masks are boolean and True means "may attend". By default this is the paper's network to the parameter. What the
paper leaves open follows its authors' tensor2tensor: no bias in the attention projections, and the decoder's
first input is the zero vector (plus its position) in place of a begin-of-sentence piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diglot.config import ModelConfig

ODD = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64's multipliers
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "swish": F.silu, "gelu": F.gelu}


class Transformer(nn.Module):
    """Figure 1: the encoder maps (x_1, ..., x_n) to memory, from which the decoder predicts piece after piece.

    >>> model = Transformer(ModelConfig(), num_src_pieces=37000, num_tgt_pieces=37000)
    >>> src, tgt = torch.randint(37000, (2, 7)), torch.randint(37000, (2, 9))
    >>> hidden = model(src, padding_mask(torch.tensor([7, 5])), tgt)
    >>> hidden.shape
    torch.Size([2, 9, 512])
    >>> model.project(hidden).shape  # [:, t] is about tgt[:, t], given tgt[:, :t]
    torch.Size([2, 9, 37000])
    """

    def __init__(self, config: ModelConfig, num_src_pieces: int, num_tgt_pieces: int):
        super().__init__()
        if config.tie == "all" and num_src_pieces != num_tgt_pieces:
            raise ValueError(f"tie 'all' needs one vocabulary, not {num_src_pieces} and {num_tgt_pieces} pieces")
        self.config = config
        self.src_embedding = Embedding(config, num_src_pieces)
        self.tgt_embedding = self.src_embedding if config.tie == "all" else Embedding(config, num_tgt_pieces)
        self.src_positions = PositionalEncoding(config)
        self.tgt_positions = PositionalEncoding(config)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.output = nn.Linear(config.d_model, num_tgt_pieces, bias=config.output_bias)
        if config.tie != "none":
            self.output.weight = self.tgt_embedding.weight
        self.dropouts = [module for module in self.modules() if isinstance(module, Dropout)]
        initialize(self)

    def forward(self, src: Tensor, src_mask: Tensor, tgt: Tensor, keys: Tensor | None = None) -> Tensor:
        """Hidden states (B, T, D): the one at t has seen tgt[:, :t] and predicts tgt[:, t]; keys are for dropout."""
        for layer, dropout in enumerate(self.dropouts):
            dropout.keys = None if keys is None else keys + (layer << 40)
        return self.decode(tgt, self.encode(src, src_mask), src_mask)

    def encode(self, src: Tensor, src_mask: Tensor) -> Tensor:
        """Memory (B, S, D) of source pieces (B, S), of which src_mask (B, S) tells the padding."""
        return self.encoder(self.src_positions(self.src_embedding(src)), src_mask[:, None, None, :])

    def decode(self, tgt: Tensor, memory: Tensor, src_mask: Tensor) -> Tensor:
        """Hidden states (B, T, D) of a whole target (B, T), all positions at once."""
        y = F.pad(self.tgt_embedding(tgt[:, :-1]), (0, 0, 1, 0))  # Figure 1: "shifted right", zero first
        mask = causal_mask(tgt.size(1), tgt.device)
        return self.decoder(self.tgt_positions(y), memory, src_mask[:, None, None, :], mask)

    def decode_step(self, last: Tensor | None, cache: Cache) -> Tensor:
        """Hidden states (B, D) after each row's newest piece (B,), which is None before the first."""
        if last is None:
            y = self.output.weight.new_zeros(len(cache.owners), 1, self.config.d_model)
        else:
            y = self.tgt_embedding(last[:, None])
        return self.decoder.step(self.tgt_positions(y, offset=cache.length), cache)[:, 0]

    def start_cache(self, memory: Tensor, src_mask: Tensor) -> Cache:
        """What the decoder keeps of a source between steps."""
        layers = [LayerCache(*layer.cross_attention.keys_and_values(memory)) for layer in self.decoder.layers]
        return Cache(layers, src_mask[:, None, None, :], torch.arange(len(memory), device=memory.device))

    def project(self, hidden: Tensor) -> Tensor:
        """3.4: the linear transformation before the softmax, (..., D) to logits (..., V)."""
        return self.output(hidden)


def initialize(model: nn.Module) -> None:
    """Glorot's uniform for matrices, N(0, 1 / d_model) for embeddings, zero for biases, as tensor2tensor."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    for module in model.modules():  # after the matrices, because the output may be an embedding
        if isinstance(module, Embedding):
            nn.init.normal_(module.weight, std=module.weight.size(1) ** -0.5)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)


# ------------------------------------------------------------------- 3.1 Encoder and Decoder Stacks


class Encoder(nn.Module):
    """A stack of N identical layers."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.layers = cast("list[EncoderLayer]", layers)
        self.norm = stack_norm(config)

    def forward(self, x: Tensor, src_mask: Tensor) -> Tensor:
        """Embedded source (B, S, D) to memory (B, S, D)."""
        for layer in self.layers:
            x = layer(x, src_mask)
        return self.norm(x)


class EncoderLayer(nn.Module):
    """Two sub-layers: self-attention and the feed-forward network.

    >>> layer = EncoderLayer(ModelConfig())
    >>> layer(torch.randn(2, 7, 512), padding_mask(torch.tensor([7, 5]))[:, None, None, :]).shape
    torch.Size([2, 7, 512])
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = MultiHeadAttention(config)
        self.feed_forward = FeedForward(config)
        self.residual_1 = Residual(config)
        self.residual_2 = Residual(config)

    def forward(self, x: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        x = self.residual_1(x, lambda x: self.self_attention(x, x, src_mask))
        return self.residual_2(x, self.feed_forward)


class Decoder(nn.Module):
    """A stack of N identical layers, each of which also looks at the encoder's memory."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.layers = cast("list[DecoderLayer]", layers)
        self.norm = stack_norm(config)

    def forward(self, y: Tensor, memory: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        """Embedded target (B, T, D) to hidden states (B, T, D)."""
        for layer in self.layers:
            y = layer(y, memory, src_mask, tgt_mask)
        return self.norm(y)

    def step(self, y: Tensor, cache: Cache) -> Tensor:
        """The newest position alone, (B, 1, D) to (B, 1, D)."""
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            y = layer.step(y, layer_cache, cache.src_mask)
        cache.length += 1
        return self.norm(y)


class DecoderLayer(nn.Module):
    """Three sub-layers: masked self-attention, attention over the memory, the feed-forward network.

    >>> layer = DecoderLayer(ModelConfig())
    >>> layer(torch.randn(2, 9, 512), torch.randn(2, 7, 512), tgt_mask=causal_mask(9)).shape
    torch.Size([2, 9, 512])
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = MultiHeadAttention(config)
        self.cross_attention = MultiHeadAttention(config)
        self.feed_forward = FeedForward(config)
        self.residual_1 = Residual(config)
        self.residual_2 = Residual(config)
        self.residual_3 = Residual(config)

    def forward(
        self, y: Tensor, memory: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        y = self.residual_1(y, lambda y: self.self_attention(y, y, tgt_mask))
        y = self.residual_2(y, lambda y: self.cross_attention(y, memory, src_mask))
        return self.residual_3(y, self.feed_forward)

    def step(self, y: Tensor, cache: LayerCache, src_mask: Tensor) -> Tensor:
        """The same for the newest position, (B, 1, D): all it may attend to lies in the cache."""

        def look_back(y: Tensor) -> Tensor:
            return self.self_attention.attend(y, *cache.extend(*self.self_attention.keys_and_values(y)))

        def look_at_source(y: Tensor) -> Tensor:
            return self.cross_attention.attend(y, cache.src_keys, cache.src_values, src_mask)

        y = self.residual_1(y, look_back)
        y = self.residual_2(y, look_at_source)
        return self.residual_3(y, self.feed_forward)


class Residual(nn.Module):
    """LayerNorm(x + Sublayer(x)), with the dropout of 5.4 on the sub-layer's output.

    `norm = "pre"` makes it x + Sublayer(LayerNorm(x)): not the paper's text, but easier to train when deep.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.is_post = config.norm == "post"
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """One residual connection around a sub-layer."""
        if self.is_post:
            return self.norm(x + self.dropout(sublayer(x)))
        return x + self.dropout(sublayer(self.norm(x)))


def stack_norm(config: ModelConfig) -> nn.Module:
    """Pre-norm leaves a stack's last sum unnormalized, so the stack ends with a norm; post-norm needs none."""
    return nn.LayerNorm(config.d_model, eps=config.norm_epsilon) if config.norm == "pre" else nn.Identity()


# ------------------------------------------------------------------- 3.2 Attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """3.2.1, equation (1): softmax(Q K^T / sqrt(d_k)) V, and the weights, which are the softmax.

    q (..., T, K) asks, k (..., S, K) answers, v (..., S, K) is what is read; mask fits (..., T, S).

    >>> read, weights = attention(torch.randn(2, 5, 64), torch.randn(2, 7, 64), torch.randn(2, 7, 64))
    >>> read.shape, weights.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 5, 7]))
    """
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)  # (..., T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)
    return (dropout(weights) if dropout else weights).to(v.dtype) @ v, weights


class MultiHeadAttention(nn.Module):
    """3.2.2: Concat(head_1, ..., head_h) W^O, where head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    The h projections of a kind are one matrix, one head below the other.

    >>> look = MultiHeadAttention(ModelConfig())
    >>> look(torch.randn(2, 5, 512), torch.randn(2, 7, 512)).shape
    torch.Size([2, 5, 512])
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_heads = config.num_heads
        d_v = config.d_model // config.num_heads
        d_k = config.d_k or d_v  # Table 3, rows B, narrow queries and keys alone
        self.w_q = nn.Linear(config.d_model, config.num_heads * d_k, bias=config.attention_bias)
        self.w_k = nn.Linear(config.d_model, config.num_heads * d_k, bias=config.attention_bias)
        self.w_v = nn.Linear(config.d_model, config.num_heads * d_v, bias=config.attention_bias)
        self.w_o = nn.Linear(config.num_heads * d_v, config.d_model, bias=config.attention_bias)
        self.dropout = Dropout(config.attention_dropout)
        self.reader: Callable[[Tensor], None] | None = None  # given the weights (B, H, T, S), while it is set

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, D) looks at memory (B, S, D), which is x itself in self-attention."""
        return self.attend(x, *self.keys_and_values(memory), mask)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) to keys and values (B, H, S, K)."""
        return self.split_heads(self.w_k(memory)), self.split_heads(self.w_v(memory))

    def attend(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, D) looks at keys and values (B, H, S, K) computed before."""
        q = self.split_heads(self.w_q(x))
        if self.reader is None and not (self.training and self.dropout.p) and prefer_fused(q, k):
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            heads, weights = attention(q, k, v, mask, self.dropout)
            if self.reader is not None:
                self.reader(weights)
        return self.w_o(heads.transpose(1, 2).flatten(2))  # (B, T, D)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, H * K) to (B, H, T, K)."""
        return x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)


def prefer_fused(q: Tensor, k: Tensor) -> bool:
    """On a CPU the explicit product is the faster one for sentences; the fused kernel is, for long texts."""
    return q.is_cuda or q.size(-2) * k.size(-2) > 128 * 128


@contextmanager
def read_attention(model: nn.Module) -> Generator[dict[str, list[Tensor]]]:
    """Collect the attention weights (B, H, T, S) of every forward pass inside the block, by the name of the module.

    Outside such a block they are not kept, nor computed where the kernel is fused.

    >>> model = Transformer(ModelConfig(), 1000, 1000)
    >>> with read_attention(model) as weights:
    ...     memory = model.encode(torch.randint(1000, (2, 7)), padding_mask(torch.tensor([7, 5])))
    >>> weights["encoder.layers.5.self_attention"][0].shape
    torch.Size([2, 8, 7, 7])
    """
    found: dict[str, list[Tensor]] = {}
    named = cast("Generator[tuple[str, nn.Module]]", model.named_modules())
    modules = {name: one for name, one in named if isinstance(one, MultiHeadAttention)}
    for name, module in modules.items():
        module.reader = found.setdefault(name, []).append
    try:
        yield found
    finally:
        for module in modules.values():
            module.reader = None


def padding_mask(lengths: Tensor, length: int | None = None) -> Tensor:
    """(B, S): True where a position holds a piece, not padding.

    >>> padding_mask(torch.tensor([1, 3]))
    tensor([[ True, False, False],
            [ True,  True,  True]])
    """
    length = int(lengths.max()) if length is None else length
    return torch.arange(length, device=lengths.device) < lengths[:, None]


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """3.2.3: (T, T), True where the target position of the row may see that of the column.

    >>> causal_mask(3)
    tensor([[ True, False, False],
            [ True,  True, False],
            [ True,  True,  True]])
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


# ------------------------------------------------------------------- 3.3 Position-wise Feed-Forward Networks


class FeedForward(nn.Module):
    """Equation (2): FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, the same at every position."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w_1 = nn.Linear(config.d_model, config.d_ff)
        self.w_2 = nn.Linear(config.d_ff, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.ffn_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        return self.w_2(self.dropout(self.activation(self.w_1(x))))


# ------------------------------------------------------------------- 3.4 Embeddings and Softmax


class Embedding(nn.Module):
    """Pieces to vectors, times sqrt(d_model)."""

    def __init__(self, config: ModelConfig, num_pieces: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_pieces, config.d_model))

    def forward(self, pieces: Tensor) -> Tensor:
        """(B, S) to (B, S, D)."""
        return F.embedding(pieces, self.weight) * math.sqrt(self.weight.size(1))


# ------------------------------------------------------------------- 3.5 Positional Encoding


def positional_encoding(num_positions: int, d_model: int, base: float = 10_000.0) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(the same): (positions, D).

    >>> positional_encoding(2, 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    position, i = torch.arange(num_positions).double()[:, None], torch.arange(d_model // 2).double()
    angle = position / base ** (2 * i / d_model)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()


class PositionalEncoding(nn.Module):
    """Adds to each position its encoding, then the dropout of 5.4. Table 3, row E, learns the encodings instead."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.base = config.position_base
        table = positional_encoding(config.max_positions, config.d_model, self.base)
        if config.positions == "learned":
            self.table = nn.Parameter(torch.randn_like(table) * config.d_model**-0.5)
        else:
            self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """x (B, T, D) begins at position `offset`."""
        return self.dropout(x + self.upto(offset + x.size(1))[offset : offset + x.size(1)])

    def upto(self, end: int) -> Tensor:
        """The encodings of at least the positions before `end`."""
        if end > len(self.table):
            if isinstance(self.table, nn.Parameter):
                raise ValueError(f"position {end} is beyond the {len(self.table)} that were learned")
            self.table = positional_encoding(2 * end, self.table.size(1), self.base).to(self.table)
        return self.table


# ------------------------------------------------------------------- 5.4 Dropout


class Dropout(nn.Module):
    """Zero with probability p (met to 1 / 65,536), else times 1 / (1 - p).

    With keys, one a sample, what is dropped of it follows from the key and the place, however the samples are batched.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.keys: Tensor | None = None  # (B,)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...)."""
        if not self.training or self.p == 0:
            return x
        if self.keys is None:
            return F.dropout(x, self.p)
        kept = random_bits(self.keys, x.shape[1:]) >= round(self.p * 2**16) - 2**15
        return x * kept.to(x.dtype).mul_(1 / (1 - self.p))


def random_bits(keys: Tensor, shape: torch.Size) -> Tensor:
    """16 bits for each place of each sample, (B, *shape), by hashing key and place as SplitMix64 does."""
    hashed = places(shape, keys.device) + keys.view(-1, *[1] * len(shape))  # 64 bits for four places
    hashed = (hashed ^ hashed >> 32).mul_(ODD[1])
    hashed = (hashed ^ hashed >> 29).mul_(ODD[2])
    return hashed.view(torch.int16)[..., : shape[-1]]


@lru_cache(64)
def places(shape: torch.Size, device: torch.device) -> Tensor:
    """A number for every four places, which padding around them does not change."""
    number = torch.arange(-(-shape[-1] // 4), device=device) * ODD[0]
    for i, length in enumerate(reversed(shape[:-1]), 1):
        number = number + ((torch.arange(length, device=device) << 20 * i) * ODD[0]).view(-1, *[1] * i)
    return number


# ------------------------------------------------------------------- One step at a time


@dataclass
class LayerCache:
    """The keys and values (B, H, S or T, K) that one decoder layer has computed."""

    src_keys: Tensor
    src_values: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest position's and return all."""
        self.keys = keys if self.keys is None else torch.cat((self.keys, keys), dim=2)
        self.values = values if self.values is None else torch.cat((self.values, values), dim=2)
        return self.keys, self.values


@dataclass
class Cache:
    """What all decoder layers keep between steps. A row is a hypothesis; several may belong to one source."""

    layers: list[LayerCache]
    src_mask: Tensor  # (B, 1, 1, S)
    owners: Tensor  # (B,) the source that a row belongs to
    length: int = 0

    def select(self, parents: Tensor) -> None:
        """Row i goes on from row parents[i]; rows may be repeated or left out."""
        owners = self.owners[parents]
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys[parents], layer.values[parents]
        if not torch.equal(owners, self.owners):  # within one source there is nothing to move
            self.owners, self.src_mask = owners, self.src_mask[parents]
            for layer in self.layers:
                layer.src_keys, layer.src_values = layer.src_keys[parents], layer.src_values[parents]
