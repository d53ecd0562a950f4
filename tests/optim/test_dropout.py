"""Dropout: one mask an inner step, whatever a solver evaluates in it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

import halp
from tests.optim.runs import (
    BIT_CENTERED,
    SOLVERS_AND_ROUNDINGS,
    VARIANCE_REDUCED,
    Run,
    assert_close,
    assert_identical,
    regression,
)
from tests.rarely import rarely_but


def net(dtype=torch.float64) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(8, 1)).to(dtype)


def train(solver: str, steps: int = 25, *, seed: int = 3, dtype=torch.float64, **options) -> Run:
    run = Run(solver, net(dtype), regression(dtype), lr=0.05, momentum=0.5, **options)
    torch.manual_seed(seed)
    return run.steps(steps)


@pytest.mark.parametrize(
    ("bit_centered", "plain"), [("BitCenterSVRG", "SVRG"), ("BitCenterSGD", "SGD")]
)
def test_bit_centered_run_without_rounding_is_the_plain_run(bit_centered, plain):
    """Were offset and delta masked differently, or the masks drawn twice, they would part."""
    assert_close(train(bit_centered).values, train(plain).values)


def test_the_masks_matter():
    assert not torch.equal(train("SVRG").values[0], train("SVRG", seed=4).values[0])


@pytest.mark.parametrize("rounding", ["void", "near", "stoc"])
def test_offset_and_delta_see_one_mask(rounding):
    torch.manual_seed(0)
    model = halp.bit_center(nn.Linear(5, 1000, bias=False).double(), rounding=rounding)
    model.weight.delta.copy_(halp.quantize(1e-3 * torch.randn(1000, 5), "fp16", scale="auto"))
    x = model(torch.randn(3, 5, dtype=torch.float64))
    y = dropout(x, 0.5)
    kept = y.offset != 0
    assert 0.4 < kept.double().mean() < 0.6
    assert torch.equal(y.delta != 0, kept & (x.delta != 0))
    assert torch.equal(y.offset, torch.where(kept, 2 * x.offset, 0))
    assert torch.equal(y.delta, torch.where(kept, 2 * x.delta, 0))


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_backward_sees_the_mask_of_the_forward(solver):
    """A unit that was dropped has no gradient, in neither part."""
    model = halp.bit_center(nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 1)))
    model[0].weight.delta.copy_(halp.quantize(1e-3 * torch.randn(64, 5), "fp16", scale="auto"))
    dropped = []
    model[1].register_forward_hook(lambda m, i, y: dropped.append(halp.value(y)[0] == 0))
    model(torch.randn(1, 5)).square().sum().backward()
    gradient = model[0].weight.grad
    assert 10 < dropped[0].sum() < 54
    for part in (gradient.offset, gradient.delta):
        assert torch.equal((part == 0).all(1), dropped[0])


def masks_of(run: Run) -> list[torch.Tensor]:
    """Filled with the zero pattern of the first dropout's output at each evaluation."""
    masks = []
    run.model[2].register_forward_hook(lambda m, i, y: masks.append(halp.value(y) == 0))
    return masks


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("solver", ["SVRG", "LPSVRG"])
def test_both_evaluations_of_a_step_see_one_mask(solver, rounding):
    precision = {"format": "fp16", "rounding": rounding}
    run = Run(solver, net(), regression(), precision=precision)
    run.snapshot()
    masks = masks_of(run)
    for _ in range(6):
        run.step()
    at_snapshot, at_current = masks[::2], masks[1::2]
    assert len(at_snapshot) == len(at_current) == 6
    for first, second in zip(at_snapshot, at_current, strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(masks[0], masks[6]), "the next pass over the data draws anew"


@pytest.mark.parametrize("solver", VARIANCE_REDUCED)
def test_a_snapshot_does_not_move_the_masks_of_the_steps(solver):
    def masks(with_snapshots: bool) -> list[torch.Tensor]:
        run = Run(solver, net(), regression())
        torch.manual_seed(0)
        run.snapshot()
        seen = []
        for _ in range(3):
            if with_snapshots:
                run.snapshot()
            found = masks_of(run)
            run.step()
            seen.append(found[-1])
        return seen

    assert_identical(masks(with_snapshots=True), masks(with_snapshots=False))


@pytest.mark.parametrize(
    ("solver", "rounding"),
    rarely_but([("SVRG", "near"), ("BitCenterSVRG", "stoc")], SOLVERS_AND_ROUNDINGS),
)
def test_runs_with_one_seed_repeat_bit_for_bit(solver, rounding):
    precision = {"format": "fp16", "rounding": rounding, "seed": 5}
    first, second = (
        train(solver, dtype=torch.float32, precision=precision).values for _ in range(2)
    )
    assert_identical(first, second)


@pytest.mark.parametrize(
    "solver", rarely_but(["BitCenterSVRG"], ["LPSGD", "LPSVRG", *BIT_CENTERED])
)
def test_stochastic_rounding_depends_on_its_seed_alone(solver):
    """Not on PyTorch's generator, which draws the masks; and another seed rounds otherwise."""

    def final(seed):
        precision = {"format": "fp16", "rounding": "stoc", "seed": seed}
        return train(solver, dtype=torch.float32, precision=precision).values[0]

    assert torch.equal(final(5), final(5))
    assert not torch.equal(final(5), final(6))


@pytest.mark.parametrize("solver", VARIANCE_REDUCED)
def test_a_step_draws_as_much_as_one_evaluation(solver):
    """So that the masks of a run do not depend on its solver."""
    run = Run(solver, net(), regression())
    run.snapshot()
    torch.manual_seed(0)
    run.step()
    after = torch.rand(())
    torch.manual_seed(0)
    run.closure(*run.batches[0])
    assert torch.equal(after, torch.rand(()))
