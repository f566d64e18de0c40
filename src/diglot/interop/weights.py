"""What all formats need to know of our weights.

Other engines keep the sines of the positions in the first half of a vector and the cosines in the second, where the
paper, and `model.py`, has them in turn. Positions are added to what runs through the residual connections, so this is
another order of d_model, in every weight that reads from there or adds to it: the network stays the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from diglot.checkpoint import StoredModel, put_weights, weights_of
from diglot.config import ModelConfig, ModelSpec
from diglot.errors import ConversionError
from diglot.interop import pieces
from diglot.interop.pieces import Special
from diglot.model import Transformer
from diglot.subwords import Subwords
from diglot.translator import TAG

READING = "w_q.weight", "w_k.weight", "w_v.weight", "w_1.weight", "embedding.weight", "output.weight", "positions.table"
ADDING = "w_o.weight", "w_o.bias", "w_2.weight", "w_2.bias", "norm.weight", "norm.bias"
FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
UNLIKELY = -30.0  # the bias of a piece that is new: e^-30 of what the unknown piece has; training lifts it in no time


def to_halves(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights in the order of sines before cosines."""
    return {name: reorder(name, weight, is_back=False) for name, weight in weights.items()}


def from_halves(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way."""
    return {name: reorder(name, weight, is_back=True) for name, weight in weights.items()}


def reorder(name: str, weight: Tensor, is_back: bool) -> Tensor:
    """One of our weights, by its name, with d_model in the other order."""
    axis = 1 if name.endswith(READING) else 0 if name.endswith(ADDING) else None
    if axis is None:
        return weight
    places = torch.arange(weight.size(axis))
    order = torch.cat((places[::2], places[1::2]))
    return weight.index_select(axis, order.argsort() if is_back else order)


def marian_base(d_model: int) -> float:
    """The base of Marian's positions: its periods reach from 2 pi to 20,000 pi, the paper's stop short of that."""
    return 10_000 ** (d_model / max(1, d_model - 2))


def name_layers(
    config: ModelConfig, encoder: Mapping[str, str], decoder: Mapping[str, str], prefix: str, first: int
) -> dict[str, str]:
    """The other engine's names of all weights in layers, by ours; `prefix` holds the stack and the layer's number."""
    stacks = (("encoder", encoder, config.num_encoder_layers), ("decoder", decoder, config.num_decoder_layers))
    return {
        f"{stack}.layers.{i}.{ours}": prefix.format(stack=stack, layer=i + first) + theirs
        for stack, table, num in stacks
        for i in range(num)
        for ours, theirs in table.items()
    }


def shapes_of(config: ModelConfig, num_src_pieces: int, num_tgt_pieces: int) -> dict[str, tuple[int, ...]]:
    """The shapes of our weights, without the weights."""
    with torch.device("meta"):
        shell = Transformer(config, num_src_pieces, num_tgt_pieces)
    return {name: tuple(parameter.shape) for name, parameter in shell.named_parameters()}


def check_tensors(where: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors that are not just those expected, all of them named; a strange one may be a part of a network
    that is not ours."""
    wrong = [f"{name} is unknown" for name in sorted(tensors.keys() - expected.keys())]
    wrong += [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        tensor = tensors[name]
        if tuple(tensor.shape) != expected[name]:
            wrong.append(f"{name} has the shape {tuple(tensor.shape)} and not {expected[name]}")
        elif tensor.dtype not in FLOATS:
            wrong.append(f"{name} holds {tensor.dtype}")
        elif tensor.untyped_storage().nbytes() < tensor.nbytes:  # a number repeated, as no engine writes it
            wrong.append(f"{name} has fewer numbers than its shape says")
        elif not tensor.isfinite().all():
            wrong.append(f"{name} holds a number that is not finite")
    if wrong:
        raise ConversionError(f"{where} does not fit its configuration: {'; '.join(wrong)}.")


def check_depth(where: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Refuse layers without end before anything is made in their number."""
    num = config.num_encoder_layers + config.num_decoder_layers
    if num > len(tensors):
        raise ConversionError(f"{where} does not fit its configuration: {len(tensors):,} tensors for {num:,} layers.")


def complete(stored: StoredModel) -> dict[str, Tensor]:
    """All that another engine may want: what is shared under each of its names, biases that we have not as zeros."""
    config, own = stored.spec.model, weights_of(stored.model)
    loose = dataclasses.replace(config, tie="none", attention_bias=True, output_bias=True)
    shapes = shapes_of(loose, stored.src_subwords.num_pieces, stored.tgt_subwords.num_pieces)
    tgt = own.get("tgt_embedding.weight", own["src_embedding.weight"])
    own = {"tgt_embedding.weight": tgt, "output.weight": tgt} | own
    return {name: own.get(name, torch.zeros(shape)) for name, shape in shapes.items()}


def grow(
    config: ModelConfig, weights: Mapping[str, Tensor], src_like: Sequence[list[int]], tgt_like: Sequence[list[int]]
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Rows for new pieces behind the others, each the mean of the rows of known pieces. So is its logit, less a bias:
    none is ever the highest, and what the model says of the old pieces stays as it was until it is trained."""
    new = dict(weights)
    if src_like and config.tie != "all":
        new["src_embedding.weight"] = with_means(weights["src_embedding.weight"], src_like)
    if tgt_like:
        for table in ("tgt_embedding.weight", "output.weight") if config.tie != "all" else ("src_embedding.weight",):
            if table in weights:
                new[table] = with_means(weights[table], tgt_like)
        num_tgt_pieces = len(weights["src_embedding.weight" if config.tie == "all" else "tgt_embedding.weight"])
        new["output.bias"] = with_means(weights.get("output.bias", torch.zeros(num_tgt_pieces)), tgt_like)
        new["output.bias"][num_tgt_pieces:] += UNLIKELY
        config = dataclasses.replace(config, output_bias=True)
    return config, new


def with_means(rows: Tensor, like: Sequence[list[int]]) -> Tensor:
    """Rows, and behind them means of some."""
    return torch.cat((rows, torch.stack([rows[ids].mean(0) for ids in like])))


def without_zero_biases(config: ModelConfig, found: Mapping[str, Tensor]) -> ModelConfig:
    """Other engines have every bias; a model that never had them is the same without."""
    of_attention = [weight for name, weight in found.items() if re.search(r"attention\.w_.\.bias", name)]
    return dataclasses.replace(
        config,
        attention_bias=any(bool(weight.any()) for weight in of_attention),
        output_bias="output.bias" in found and bool(found["output.bias"].any()),
    )


def number_pieces(
    path: Path, spec: ModelSpec, found: dict[str, Tensor], sides: Sequence[tuple[bytes, list[str]]], special: Special
) -> StoredModel:
    """The model with SentencePiece models that number the pieces as its matrices do; each side has its SentencePiece
    model and its pieces in order. A piece that SentencePiece splits text into, and that has no number, is an unknown
    one to other engines: it gets a row of its own that is a copy of that."""
    more = [pieces.beyond(proto, names) for proto, names in sides]
    if sides[0][1] == sides[1][1]:
        more = [list(dict.fromkeys(more[0] + more[1]))] * 2
    tags = [tag[1] for name in sides[0][1] if (tag := TAG.fullmatch(name))]
    made = [
        pieces.check(pieces.arrange(proto, [*names, *new], special), "the vocabulary")
        for (proto, names), new in zip(sides, more, strict=True)
    ]
    like = [[[names.index(special.unk)]] * len(new) for (_, names), new in zip(sides, more, strict=True)]
    config, grown = grow(spec.model, found, *like)
    src_subwords = Subwords(made[0])
    tgt_subwords = Subwords(made[1]) if made[1] != made[0] else src_subwords
    spec = dataclasses.replace(spec, model=config, languages=dataclasses.replace(spec.languages, tags=tuple(tags)))
    model = Transformer(config, src_subwords.num_pieces, tgt_subwords.num_pieces)
    put_weights(model, grown)
    return StoredModel(path, spec, model, src_subwords, tgt_subwords)
