"""A plain PyTorch training loop, frozen: what a good programmer writes in an afternoon, for a measure that stays.

It needs torch and numpy alone, and runs in an environment of its own: diglot's code of the day changes nothing here.
`--network plain` is the Transformer below, `--network marian` the MarianMT of transformers.

    python loop.py CORPUS --layers 4 --d-model 128 --d-ff 256 --heads 4 --norm pre --warmup 1000 --scale 1.5 --updates 9
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, EOS = 0, 1
UPDATE_PIECES, DROPOUT, SMOOTHING = 4096, 0.1, 0.1
Pairs = list[tuple[np.ndarray, np.ndarray]]


class Plain(nn.Module):
    """The network: B sentences, S and T pieces of source and target, D wide."""

    def __init__(self, num_pieces: int, layers: int, d_model: int, d_ff: int, heads: int, norm: str, is_fused: bool):
        super().__init__()
        self.embedding = nn.Embedding(num_pieces, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.encoder = nn.ModuleList(Layer(d_model, d_ff, heads, norm, is_fused, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(d_model, d_ff, heads, norm, is_fused, True) for _ in range(layers))
        is_pre = norm == "pre"
        self.encoder_norm, self.decoder_norm = (nn.LayerNorm(d_model) if is_pre else nn.Identity() for _ in range(2))
        angle = torch.arange(1024)[:, None] / 10000 ** (torch.arange(0, d_model, 2) / d_model)
        self.register_buffer("positions", torch.stack((angle.sin(), angle.cos()), -1).flatten(1))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Logits (B, T, V) of tgt (B, T), given src (B, S)."""
        src_mask = (src != PAD)[:, None, None, :]
        tgt_mask = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool).tril()
        x = self.embed(self.embedding(src))
        for layer in self.encoder:
            x = layer(x, src_mask, None, None)
        memory = self.encoder_norm(x)
        y = self.embed(F.pad(self.embedding(tgt[:, :-1]), (0, 0, 1, 0)))  # the decoder's first input is zero
        for layer in self.decoder:
            y = layer(y, tgt_mask, memory, src_mask)
        return F.linear(self.decoder_norm(y), self.embedding.weight)

    def embed(self, x: Tensor) -> Tensor:
        """Embedded pieces with their positions."""
        return F.dropout(x * math.sqrt(x.size(-1)) + self.positions[: x.size(1)], DROPOUT, self.training)


class Layer(nn.Module):
    """Of the encoder, or of the decoder, which also looks at the source."""

    def __init__(self, d_model: int, d_ff: int, heads: int, norm: str, is_fused: bool, looks_at_source: bool):
        super().__init__()
        self.is_pre = norm == "pre"
        self.attention = Attention(d_model, heads, is_fused)
        self.cross = Attention(d_model, heads, is_fused) if looks_at_source else None
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(3 if looks_at_source else 2))
        for linear in (self.w_1, self.w_2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        sublayers = [lambda x: self.attention(x, x, mask), lambda x: self.w_2(self.w_1(x).relu())]
        if self.cross is not None:
            sublayers.insert(1, lambda x: self.cross(x, memory, memory_mask))
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            if self.is_pre:
                x = x + F.dropout(sublayer(norm(x)), DROPOUT, self.training)
            else:
                x = norm(x + F.dropout(sublayer(x), DROPOUT, self.training))
        return x


class Attention(nn.Module):
    """Multi-head attention, by PyTorch's fused kernel or by explicit products."""

    def __init__(self, d_model: int, heads: int, is_fused: bool):
        super().__init__()
        self.heads, self.is_fused = heads, is_fused
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        for linear in (self.w_q, self.w_k, self.w_v, self.w_o):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D) looks at memory (B, S, D)."""
        q, k, v = (
            w(of).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for w, of in ((self.w_q, x), (self.w_k, memory), (self.w_v, memory))
        )
        if self.is_fused:
            read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
            read = scores.masked_fill(~mask, -math.inf).softmax(-1).to(v.dtype) @ v
        return self.w_o(read.transpose(1, 2).flatten(2))


class Marian(nn.Module):
    """The MarianMT of transformers, called as `Plain` is. It is post-norm alone and has biases in attention."""

    def __init__(self, num_pieces: int, layers: int, d_model: int, d_ff: int, heads: int, norm: str, is_fused: bool):
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        config = MarianConfig(
            vocab_size=num_pieces, d_model=d_model, encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=d_ff,
            decoder_ffn_dim=d_ff, encoder_attention_heads=heads, decoder_attention_heads=heads, dropout=DROPOUT,
            activation_function="relu", scale_embedding=True, pad_token_id=PAD, eos_token_id=EOS,
            decoder_start_token_id=PAD, share_encoder_decoder_embeddings=True, use_cache=False,
            init_std=d_model**-0.5, attn_implementation="sdpa" if is_fused else "eager",
        )  # fmt: skip
        self.model = MarianMTModel(config)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Logits (B, T, V) of tgt (B, T), given src (B, S)."""
        given = F.pad(tgt[:, :-1], (1, 0), value=PAD)
        return self.model(input_ids=src, attention_mask=(src != PAD).long(), decoder_input_ids=given).logits


def read_pairs(path: Path) -> Pairs:
    """The ids of each pair."""
    with np.load(path) as ids:
        sides = (np.split(ids[name], ids[f"{name}_ends"][:-1]) for name in ("src", "tgt"))
        return list(zip(*sides, strict=True))


def cut(pairs: Pairs, num_pieces: int) -> list[Pairs]:
    """Batches of like length with about so many target pieces each."""
    batches: list[Pairs] = [[]]
    held = 0
    for pair in sorted(pairs, key=lambda pair: (len(pair[1]), len(pair[0]))):
        if held + len(pair[1]) > num_pieces and batches[-1]:
            batches.append([])
            held = 0
        batches[-1].append(pair)
        held += len(pair[1])
    return batches


def updates(pairs: Pairs, at_once: int, seed: int) -> Iterator[list[Pairs]]:
    """For ever: the batches of an update, each of at most so many target pieces; epochs differ in the order."""
    groups = [cut(update, at_once) for update in cut(pairs, UPDATE_PIECES)]
    rng = np.random.default_rng(seed)
    while True:
        for i in rng.permutation(len(groups)):
            yield groups[i]


def tensors(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Source and target, padded."""
    sides = ([torch.from_numpy(pair[side]) for pair in pairs] for side in (0, 1))
    src, tgt = (nn.utils.rnn.pad_sequence(side, batch_first=True, padding_value=PAD) for side in sides)
    return src, tgt


def loss_of(network: nn.Module, pairs: Pairs, smoothing: float) -> Tensor:
    """The sum over the target pieces."""
    src, tgt = tensors(pairs)
    logits = network(src, tgt).flatten(0, 1).float()
    return F.cross_entropy(logits, tgt.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=smoothing)


def main() -> None:
    """Train, say each update, and in the end the loss on the validation text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--network", choices=("plain", "marian"), default="plain")
    for name in ("layers", "d-model", "d-ff", "heads", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--norm", choices=("pre", "post"), required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--pieces", type=int, default=8000, help="of the vocabulary")
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--at-once", type=int, default=UPDATE_PIECES, help="target pieces that go through at once")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--attention", choices=("fused", "explicit"), default="fused")
    parser.add_argument("--keep-memory", action="store_true", help="have glibc keep freed tensors")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    if args.keep_memory:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    make: Any = {"plain": Plain, "marian": Marian}[args.network]
    is_fused = args.attention == "fused"
    network = make(args.pieces, args.layers, args.d_model, args.d_ff, args.heads, args.norm, is_fused)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16")

    for step, batches in enumerate(updates(read_pairs(args.corpus / "train.npz"), args.at_once, args.seed), 1):
        num_pieces = sum(len(pair[1]) for batch in batches for pair in batch)
        for batch in batches:
            with autocast():
                loss = loss_of(network, batch, SMOOTHING)
            (loss / num_pieces).backward()
        rate = args.scale * args.d_model**-0.5 * min(step**-0.5, step * args.warmup**-1.5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"update": step, "pieces": num_pieces}), flush=True)
        if step == args.updates:
            break
    valid = cut(read_pairs(args.corpus / "valid.npz"), UPDATE_PIECES)
    network.eval()
    with torch.no_grad(), autocast():
        nll = sum(float(loss_of(network, batch, 0.0)) for batch in valid)
    print(json.dumps({"valid_nll": nll / sum(len(pair[1]) for batch in valid for pair in batch)}), flush=True)


if __name__ == "__main__":
    main()
