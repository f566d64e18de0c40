import pytest
import torch
import torch.nn.functional as F

import diglot.loss
from diglot.loss import smoothed_loss

N, D, V = 23, 8, 11


def leaves():
    """Hidden states, weight, bias and target pieces."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((N, D), (V, D), (V,))
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    target = torch.randint(V, (N,), generator=generator)
    return [leaf.requires_grad_() for leaf in (hidden, weight, bias)], target


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("rows_of_a_chunk", [1, 5, N, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_loss_and_gradients_are_those_of_cross_entropy(smoothing, rows_of_a_chunk, with_bias, monkeypatch):
    monkeypatch.setattr(diglot.loss, "CHUNK_BYTES", rows_of_a_chunk * 4 * V)
    (hidden, weight, bias), target = leaves()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    logits = F.linear(hidden, weight, bias if with_bias else None)
    expected = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="sum")
    loss, nll = smoothed_loss(hidden, weight, bias if with_bias else None, target, smoothing)
    torch.testing.assert_close(loss.float(), expected)
    torch.testing.assert_close(nll.float(), F.cross_entropy(logits, target, reduction="sum"))
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs))


def test_smoothing_is_the_closed_form_of_the_paper():
    (hidden, weight, bias), target = leaves()
    log_p = (hidden @ weight.T + bias).log_softmax(-1)
    wanted = torch.full((N, V), 0.1 / V).scatter_add_(1, target[:, None], torch.full((N, 1), 0.9))
    torch.testing.assert_close(wanted.sum(1), torch.ones(N))  # a distribution
    torch.testing.assert_close(smoothed_loss(hidden, weight, bias, target, 0.1)[0].float(), -(wanted * log_p).sum())


def test_gradients_scale_with_that_of_the_loss():
    (hidden, weight, bias), target = leaves()
    loss, _ = smoothed_loss(hidden, weight, bias, target, 0.1)
    once = torch.autograd.grad(loss, [hidden, weight, bias], retain_graph=True)
    scaled = torch.autograd.grad(-loss / 7, [hidden, weight, bias])
    torch.testing.assert_close(scaled, tuple(-gradient / 7 for gradient in once))


def test_the_whole_is_the_sum_of_its_parts_however_ragged():
    (hidden, weight, bias), target = leaves()
    whole = smoothed_loss(hidden, weight, bias, target, 0.1)
    parts = [
        smoothed_loss(hidden[rows], weight, bias, target[rows], 0.1)
        for rows in (slice(0, 3), slice(3, 3), slice(3, None))
    ]
    torch.testing.assert_close(tuple(map(sum, zip(*parts, strict=True))), whole)
    of_parts = torch.autograd.grad(sum(loss for loss, _ in parts), [hidden, weight, bias])
    torch.testing.assert_close(of_parts, torch.autograd.grad(whole[0], [hidden, weight, bias]))


def test_the_likelihood_carries_no_gradient():
    (hidden, weight, bias), target = leaves()
    loss, nll = smoothed_loss(hidden, weight, bias, target, 0.1)
    assert loss.requires_grad
    assert not nll.requires_grad


def test_the_loss_is_the_same_where_nothing_is_learnt():
    (hidden, weight, bias), target = leaves()
    learnt = smoothed_loss(hidden, weight, bias, target, 0.1)
    with torch.no_grad():
        loss, nll = smoothed_loss(hidden, weight, bias, target, 0.1)
    assert not loss.requires_grad
    torch.testing.assert_close((loss, nll), tuple(value.detach() for value in learnt), rtol=0, atol=0)


def test_only_what_learns_has_a_gradient():
    (hidden, weight, bias), target = leaves()
    smoothed_loss(hidden, weight.detach(), bias.detach(), target, 0.1)[0].backward()
    assert hidden.grad is not None
    assert weight.grad is None
    assert bias.grad is None


def test_bf16_is_near_to_fp32():
    (hidden, weight, bias), target = leaves()
    exact = smoothed_loss(hidden, weight, bias, target, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss, nll = smoothed_loss(hidden, weight, bias, target, 0.1)
    assert loss.dtype == nll.dtype == torch.float64  # sums over many pieces
    torch.testing.assert_close((loss, nll), exact, rtol=1e-2, atol=0)
    near = torch.autograd.grad(loss, [hidden, weight, bias])
    for gradient, of_exact in zip(near, torch.autograd.grad(exact[0], [hidden, weight, bias]), strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - of_exact).norm() < 0.02 * of_exact.norm()


def test_large_logits_stay_finite():
    (hidden, weight, bias), target = leaves()
    loss, nll = smoothed_loss(hidden * 1e4, weight, bias, target, 0.1)
    assert torch.isfinite(torch.stack((loss, nll))).all()
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(loss, [hidden, weight, bias]))
