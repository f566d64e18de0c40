"""The packed pass of a CPU is the network of model.py: the same hidden states and gradients, with the same dropped."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diglot import kernels
from diglot.config import ModelConfig
from diglot.loader import MicroBatch
from diglot.loss import losses_and_gradient, smoothed_loss
from diglot.model import ACTIVATIONS, Transformer
from diglot.packed import NO_DROP, PackedTransformer

pytestmark = pytest.mark.skipif(not kernels.are_there(), reason="diglot was installed without a compiler")

SMALL = {"d_model": 64, "d_ff": 96, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
NUM_PIECES = 50
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm": "pre"},
    {"activation": "swish"},
    {"activation": "gelu"},
    {"positions": "learned"},
    {"position_base": 300.0, "norm_epsilon": 0.01},
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


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"norm": "pre", "attention_dropout": 0.2, "activation": "swish"}], ids=str)
def test_so_do_the_kernels_for_other_processors(options: dict[str, Any], level: int):
    if not kernels.library().diglot_use(level):
        pytest.skip("this processor has not got these instructions")
    try:
        test_it_computes_what_the_network_computes(options)
        test_in_bf16_it_is_the_same_to_its_precision()
    finally:
        kernels.library().diglot_use(-1)


@pytest.mark.parametrize("num_threads", [1, 3, 7])
def test_so_do_other_numbers_of_threads(num_threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        test_it_computes_what_the_network_computes({})
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ["relu", "swish", "gelu"])
def test_numbers_of_any_size_are_activated_as_pytorch_does(activation: str):
    x = torch.tensor([-1e30, -1000, -150, -100, -89, -20, -1, -0.0, 0, 1e-30, 1, 20, 89, 1000, 1e30, math.nan])
    x = x[None].requires_grad_()
    wanted = ACTIVATIONS[activation](x)
    wanted.sum().backward()
    none = torch.zeros(1, dtype=torch.int64)
    rows = kernels.Rows(none, none, none, none, 1)
    found = kernels.activation(activation, x.detach(), rows, NO_DROP)
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-30, equal_nan=True)
    slope = kernels.activation_backward(activation, x.detach(), torch.ones_like(x), rows, NO_DROP)
    assert x.grad is not None
    torch.testing.assert_close(slope, x.grad, rtol=1e-5, atol=1e-6, equal_nan=True)


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


@pytest.mark.parametrize("scale", [60.0, 1e5, 1e30])
def test_large_logits_lose_no_more_than_log_softmax_does(scale: float):
    logits = torch.randn(40, 37, generator=torch.Generator().manual_seed(3)) + scale * torch.eye(40, 37)
    target = torch.arange(40) % 37
    exact = torch.nn.functional.cross_entropy(logits.double(), target, reduction="sum")
    sums, _ = losses_and_gradient(logits.clone(), target, 0.0)
    torch.testing.assert_close(sums[1], exact, rtol=1e-5, atol=1e-5)


def test_what_is_no_number_is_not_hidden():
    logits = torch.zeros(1, 40)
    logits[0, 20] = math.nan
    sums, gradient = losses_and_gradient(logits, torch.tensor([3]), 0.1)
    assert sums.isnan().all()
    assert gradient.isnan().any()


@pytest.mark.parametrize("content", [b"", b"no library", None], ids=str)
def test_a_library_that_is_not_ours_is_not_used(content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "_kernels.so"
    origin = kernels.library()._name if content is None else str(path)
    if content is None:
        monkeypatch.setattr(kernels, "STRUCTURES", kernels.STRUCTURES[::-1])
    else:
        path.write_bytes(content)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: SimpleNamespace(origin=origin))
    kernels.library.cache_clear()
    try:
        assert not kernels.are_there()
        assert kernels.why_not().endswith("install diglot again")
    finally:
        monkeypatch.undo()
        kernels.library.cache_clear()


def test_the_same_again_is_the_same_to_the_last_bit():
    model, micro = some_network(attention_dropout=0.1), some_pairs()
    network = PackedTransformer(model, torch.bfloat16)
    hidden, gradients = pass_of(network, model, micro)
    again, found = pass_of(network, model, micro)
    assert torch.equal(hidden, again)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
