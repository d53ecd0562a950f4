"""Fixed point with ``mu``: z of each parameter lies on a grid whose range is ‖g̃‖/μ."""

import math

import pytest
import torch

import halp
from tests.optim.runs import linear, regression

MU = 0.25


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return regression(sizes=(19,))[0]


def make(format: str = "fixed8", rounding: str = "stoc", mu: float | None = MU, **options):
    """A model, a closure and an optimizer after its first snapshot."""
    torch.manual_seed(0)
    model = halp.bit_center(linear(), format, rounding, offset_dtype=torch.float64)
    arguments = {"lr": 0.05, "T": 3, "mu": mu, **options}
    optimizer = halp.optim.BitCenterSVRG(model.parameters(), **arguments)
    data = batch()

    def closure(x, y):
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        return loss

    optimizer.snapshot([data], closure)
    return model, optimizer, lambda: closure(*data)


def full_gradient(model, weight_decay: float = 0.0) -> list[torch.Tensor]:
    """∇f at w̃ by autograd in float64, on a plain copy."""
    plain = linear().double()
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.copy_(q.offset)
    x, y = batch()
    (plain(x).squeeze(1) - y).square().mean().backward()
    return [p.grad + weight_decay * p.detach() for p in plain.parameters()]


@pytest.mark.parametrize("format, steps", [("fixed8", 127), ("fixed16", 32767), ("fixed4", 7)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_z_lies_on_multiples_of_the_gradient_norm_over_mu(format, steps, weight_decay):
    model, optimizer, closure = make(format, weight_decay=weight_decay)
    gradients = full_gradient(model, weight_decay)
    for _ in range(3):
        optimizer.step(closure)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            scale = gradient.norm().item() / (MU * steps)
            count = p.delta.double() / scale
            torch.testing.assert_close(count, count.round(), atol=1e-3, rtol=0)
            assert count.abs().max() <= steps + 1


def test_the_scale_follows_the_gradient_of_each_snapshot():
    model, optimizer, closure = make(lr=0.1)
    scales = []
    for _ in range(4):
        for _ in range(3):
            optimizer.step(closure)
        optimizer.snapshot([batch()], lambda x, y: closure())
        scales.append([optimizer.state[p]["scale"] for p in model.parameters()])
        expected = [g.norm().item() / (MU * 127) for g in full_gradient(model)]
        assert scales[-1] == pytest.approx(expected, rel=1e-12)
    assert scales[-1][0] < scales[0][0]


def test_what_lies_beyond_the_range_saturates_and_is_counted():
    model, optimizer, closure = make(mu=50.0, lr=1.0)
    assert optimizer.saturated == 0
    optimizer.step(closure)
    beyond = 0
    for p in model.parameters():
        steps = p.delta.double() / optimizer.state[p]["scale"]
        assert steps.max() < 127.01 and steps.min() > -128.01
        beyond += int(((steps > 126.9) | (steps < -127.9)).sum())
    assert 0 < optimizer.saturated <= beyond
    before = optimizer.saturated
    optimizer.step(closure)
    assert optimizer.saturated > before


def test_a_gradient_of_zero_keeps_the_last_scale_and_makes_no_nan():
    model, optimizer, closure = make()
    before = [optimizer.state[p]["scale"] for p in model.parameters()]

    def at_the_optimum(x, y):
        closure()
        loss = sum((p * 0).sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.snapshot([batch()], at_the_optimum)
    assert [optimizer.state[p]["scale"] for p in model.parameters()] == before
    optimizer.step(lambda: at_the_optimum(None, None))
    assert all(p.delta.isfinite().all() for p in model.parameters())


def test_nearest_drops_updates_below_half_a_step():
    model, optimizer, closure = make(rounding="near", mu=0.01, lr=1e-4)
    for _ in range(3):
        optimizer.step(closure)
    assert all((p.delta == 0).all() for p in model.parameters())


def test_without_mu_z_is_scaled_to_itself():
    model, optimizer, closure = make(mu=None)
    optimizer.step(closure)
    for p in model.parameters():
        assert "scale" not in optimizer.state[p]
        largest = p.delta.abs().max().item()
        exponent = math.ceil(math.log2(largest / 127))
        count = p.delta.double() / 2.0**exponent
        assert torch.equal(count, count.round()) and count.abs().max() <= 127


def test_a_resumed_run_has_the_scales_and_counts(tmp_path):
    runs = [make(mu=50.0, lr=1.0) for _ in range(2)]
    for _, optimizer, closure in runs[:1]:
        optimizer.step(closure)
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        optimizer.step(closure)
    model, optimizer, closure = runs[1]
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    optimizer.step(closure)
    assert optimizer.saturated == runs[0][1].saturated > 0
    for p, q in zip(model.parameters(), runs[0][0].parameters(), strict=True):
        assert torch.equal(p.delta, q.delta)


@pytest.mark.parametrize("mu", [0, -1.0, math.inf, math.nan])
def test_a_mu_that_is_not_positive_is_refused(mu):
    with pytest.raises(ValueError, match=f"mu must be positive or None, not {mu}"):
        make(mu=mu)


def test_mu_needs_fixed_point():
    with pytest.raises(ValueError, match="mu=0.25 is for fixed-point formats, and fp16 is not one"):
        make("fp16")
