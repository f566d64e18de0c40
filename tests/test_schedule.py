import math

import pytest
import torch
from torch import nn

from diglot.config import TrainConfig
from diglot.schedule import lrate, make_optimizer


@pytest.mark.parametrize(("d_model", "warmup_steps"), [(512, 4000), (1024, 4000), (128, 1)])
@pytest.mark.parametrize("step", [1, 2, 3999, 4000, 4001, 100_000])
def test_lrate_is_equation_3(step, d_model, warmup_steps):
    rising = step / warmup_steps / math.sqrt(warmup_steps)
    falling = 1 / math.sqrt(step)
    expected = (rising if step < warmup_steps else falling) / math.sqrt(d_model)
    assert lrate(step, d_model, warmup_steps) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("d_model", "peak"), [(512, "6.99e-04"), (1024, "4.94e-04")])
def test_the_learning_rate_peaks_at_the_last_step_of_its_warmup(d_model, peak):
    rates = [lrate(step, d_model) for step in range(1, 12_001)]
    assert f"{max(rates):.2e}" == peak
    assert rates.index(max(rates)) + 1 == 4000 == TrainConfig().warmup_steps
    assert rates[:4000] == sorted(rates[:4000])
    assert rates[3999:] == sorted(rates[3999:], reverse=True)


def test_the_learning_rate_scales():
    assert lrate(17, 512, 4000, scale=2.5) == pytest.approx(2.5 * lrate(17, 512, 4000))


def test_the_optimizer_is_the_papers_adam():
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model)
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.Adam)
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}


def test_an_update_is_adams():
    model, rate = nn.Linear(3, 1, bias=False), 0.01
    weight, m, v = model.weight.detach().double(), 0, 0
    optimizer = make_optimizer(model)
    for step, x in enumerate((1.0, -2.0, 0.5), 1):
        optimizer.zero_grad()
        gradient = torch.tensor([[x, 2 * x, 1e-9]])
        model.weight.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient.double(), 0.98 * v + 0.02 * gradient.double() ** 2
        m_hat, v_hat = m / (1 - 0.9**step), v / (1 - 0.98**step)
        weight = weight - rate * m_hat / (v_hat.sqrt() + 1e-9)
        torch.testing.assert_close(model.weight.detach().double(), weight, rtol=1e-5, atol=1e-6)
