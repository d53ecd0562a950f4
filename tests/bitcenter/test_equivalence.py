"""Without rounding, the bit-centered solvers are the plain ones (row 1).

In float64, where bc-svrg's iterate w̃ + z and svrg's w differ by roundoff alone, for every model of
the table of cases, over several cycles.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halp
from tests.cases import CASES, DROPOUT, LOGISTIC, MLPS, RELU, Case, by_name

CYCLES, T = 3, 5
#: The last batch is a short one, and T does not divide an epoch.
BATCH_SIZES = [16, 16, 16, 7]
RELATIVE_ERROR = 1e-12
EVERYTHING = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}
#: Large gradients or curvatures want small steps, lest chaos amplify roundoff.
SMALL_STEPS = {"confident", "confident-logreg", "summed", "saturated-tanh", "tied-transpose"}


def batches_of(case: Case) -> list[tuple[Tensor, Tensor]]:
    if case.batch_size == 1:
        return case.batches(len(BATCH_SIZES), 1, dtype=torch.float64)
    return [
        batch
        for seed, size in enumerate(BATCH_SIZES)
        for batch in case.batches(1, size, seed, torch.float64)
    ]


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([halp.value(p).flatten() for p in model.parameters()])


def train(
    case: Case, solver: type, model: nn.Module, options: dict[str, Any], steps: int = CYCLES * T
) -> tuple[list[Tensor], list[float]]:
    """Return the weights after every step, and the losses that the steps returned."""
    torch.manual_seed(0)
    batches = batches_of(case)
    if solver is not halp.optim.SGD:
        options = {**options, "T": T}
    lr = 1e-3 if case.name in SMALL_STEPS else 0.05
    optimizer = solver(model.parameters(), **{"lr": lr, **options})

    def closure(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = case.loss_of(model, x, y)
        loss.backward()
        return loss

    weights, losses, snapshots = [weights_of(model)], [], 0
    for step in range(steps):
        if optimizer.snapshot_due:
            optimizer.snapshot(batches, closure)
            snapshots += 1
        batch = batches[step % len(batches)]
        losses.append(optimizer.step(lambda batch=batch: closure(*batch)).item())
        weights.append(weights_of(model))
    assert snapshots == (0 if solver is halp.optim.SGD else CYCLES)
    return weights, losses


def assert_equivalent(case: Case, bit_centered: type, plain: type, options: dict) -> None:
    model = halp.bit_center(case.model(dtype=torch.float64), rounding="void")
    computed, losses = train(case, bit_centered, model, options)
    expected, expected_losses = train(case, plain, case.model(dtype=torch.float64), options)
    for w, w_plain in zip(computed, expected, strict=True):
        assert (w - w_plain).norm() <= RELATIVE_ERROR * w_plain.norm()
    assert losses == pytest.approx(expected_losses, rel=RELATIVE_ERROR)
    moved = (expected[-1] - expected[0]).norm() / expected[0].norm()
    assert moved > 1e-3, "the solvers agree on not moving"


PAIRS = pytest.mark.parametrize(
    ("bit_centered", "plain"),
    [
        (halp.optim.BitCenterSVRG, halp.optim.SVRG),
        (halp.optim.BitCenterSGD, halp.optim.SGD),
    ],
    ids=["svrg", "sgd"],
)


@PAIRS
@by_name(CASES)
def test_without_rounding_the_bit_centered_solver_is_the_plain_one(case, bit_centered, plain):
    assert_equivalent(case, bit_centered, plain, EVERYTHING)


@PAIRS
@pytest.mark.parametrize("case", [LOGISTIC[0], MLPS[0], RELU[0], DROPOUT[0]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 1e-2},
        {"momentum": 0.5, "weight_decay": 1e-2, "maximize": True, "lr": 1e-2},
    ],
    ids=["plain", "momentum", "nesterov", "weight decay", "maximize"],
)
def test_with_each_option_the_bit_centered_solver_is_the_plain_one(
    case, options, bit_centered, plain
):
    assert_equivalent(case, bit_centered, plain, options)


def test_without_variance_reduction_the_solvers_would_not_be_equal():
    """The tolerance is one that tells the solvers apart."""
    case = MLPS[0]
    svrg, _ = train(case, halp.optim.SVRG, case.model(dtype=torch.float64), EVERYTHING)
    sgd, _ = train(case, halp.optim.SGD, case.model(dtype=torch.float64), EVERYTHING)
    assert (svrg[-1] - sgd[-1]).norm() > 1e-3 * sgd[-1].norm()


@pytest.mark.parametrize("case", DROPOUT, ids=str)
def test_dropout_masks_are_those_of_the_seed_and_differ_between_steps(case):
    def run() -> list[Tensor]:
        model = halp.bit_center(case.model(dtype=torch.float64), rounding="void")
        return train(case, halp.optim.BitCenterSVRG, model, EVERYTHING)[0]

    first, again = run(), run()
    assert all(map(torch.equal, first, again))
