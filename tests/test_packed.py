"""The packed pass of a CPU is the network of model.py: the same hidden states and gradients, with the same dropped."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diglot import kernels
from diglot.config import ModelConfig
from diglot.loader import MicroBatch
from diglot.loss import losses_and_gradient, smoothed_loss
from diglot.model import Transformer
from diglot.packed import PackedTransformer

pytestmark = pytest.mark.skipif(not kernels.are_there(), reason="diglot was installed without a compiler")

SMALL = {"d_model": 64, "d_ff": 96, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
NUM_PIECES = 50
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm": "pre"},
    {"activation": "swish"},
    {"activation": "gelu"},
    {"positions": "learned"},
    {"tie": "output"},
    {"tie": "none"},
    {"attention_dropout": 0.2, "ffn_dropout": 0.1},
    {"dropout": 0.0},
    {"norm": "pre", "dropout": 0.0},
    {"attention_bias": True, "output_bias": True},
    {"d_k": 8},
    {"d_k": 24},
    {"num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 3},
]


def some_pairs(num: int = 20, longest: int = 50) -> MicroBatch:
    rng = np.random.default_rng(num)
    lengths = rng.integers(1, longest, (2, num))
    src, tgt = (
        np.where(np.arange(longest) < own[:, None], rng.integers(3, NUM_PIECES, (num, longest)), 0) for own in lengths
    )
    return MicroBatch(src, lengths[0], tgt, lengths[1], rng.integers(-(2**62), 2**62, num))


def some_network(**options: Any) -> Transformer:
    torch.manual_seed(1)
    config = dataclasses.replace(ModelConfig(dropout=0.1), **{**SMALL, **options})
    model = Transformer(config, NUM_PIECES, NUM_PIECES).train()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # which are 0 and 1 at first
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def pass_of(network: nn.Module, model: Transformer, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states in rows that hold a piece, and the gradients of a loss over them."""
    model.zero_grad()
    hidden, wanted = micro.through(network, "cpu", False)
    hidden = hidden[wanted >= 0]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    (hidden.float() * weights).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_it_computes_what_the_network_computes(options: dict[str, Any]):
    model, micro = some_network(**options), some_pairs()
    hidden, gradients = pass_of(model, model, micro)
    packed, found = pass_of(PackedTransformer(model, torch.float32), model, micro)
    torch.testing.assert_close(packed, hidden, rtol=1e-5, atol=1e-5)
    assert found.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6 * largest, msg=name)


def test_in_bf16_it_is_the_same_to_its_precision():
    model, micro = some_network(), some_pairs()
    hidden, gradients = pass_of(model, model, micro)
    packed, found = pass_of(PackedTransformer(model, torch.bfloat16), model, micro)
    assert float((packed.float() - hidden).norm() / hidden.norm()) < 0.01
    for name, gradient in gradients.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 0.05, name


def test_what_stands_beside_a_sentence_changes_nothing():
    model, micro = some_network(), some_pairs()
    network = PackedTransformer(model, torch.float32)
    together, wanted = micro.through(network, "cpu", False)
    together = together[wanted >= 0].split(micro.tgt_lengths.tolist())
    for i in range(len(micro.src)):
        one = MicroBatch(
            *(array[i : i + 1] for array in (micro.src, micro.src_lengths, micro.tgt, micro.tgt_lengths, micro.keys))
        )
        alone, wanted = one.through(network, "cpu", False)
        torch.testing.assert_close(alone[wanted >= 0], together[i], rtol=1e-5, atol=1e-5)


def test_rows_that_fill_up_are_not_learnt_from():
    model, micro = some_network(), some_pairs()
    hidden, wanted = micro.through(PackedTransformer(model, torch.float32), "cpu", False)
    assert len(wanted) % 256 == 0
    assert int((wanted >= 0).sum()) == micro.tgt_lengths.sum()
    every, _ = smoothed_loss(hidden, model.output.weight, None, wanted, 0.1)
    own, _ = smoothed_loss(hidden[wanted >= 0], model.output.weight, None, wanted[wanted >= 0], 0.1)
    torch.testing.assert_close(every, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_pieces", [3, 16, 37, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_kernel_of_the_loss_agrees_with_log_softmax(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_pieces: int, smoothing: float
):
    logits = (torch.randn(40, num_pieces, generator=torch.Generator().manual_seed(3)) * 5).to(dtype)
    target = torch.arange(40) % (num_pieces + 1) - 1  # some count for nothing
    sums, gradient = losses_and_gradient(logits.clone(), target, smoothing)
    monkeypatch.setattr(kernels, "are_there", lambda: False)
    plain_sums, plain_gradient = losses_and_gradient(logits.clone(), target, smoothing)
    torch.testing.assert_close(sums, plain_sums, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_the_same_again_is_the_same_to_the_last_bit():
    model, micro = some_network(attention_dropout=0.1), some_pairs()
    network = PackedTransformer(model, torch.bfloat16)
    hidden, gradients = pass_of(network, model, micro)
    again, found = pass_of(network, model, micro)
    assert torch.equal(hidden, again)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
