"""Buffers that the model replaces by new tensors are not left to move where they must not."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import halp
from halp.training import Watch, measure_training
from tests.optim.runs import (
    VARIANCE_REDUCED,
    WITH_SNAPSHOTS,
    Run,
    assert_identical,
    linear,
    mean_squares,
    regression,
)


class Counting(nn.Module):
    """Counts its passes, in a new tensor each time, and keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x)


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_a_buffer_that_is_assigned_moves_once_a_step_given_the_model(solver):
    model = Counting()
    Run(solver, model, regression(), buffers=model, T=3).steps(8)
    expected = Counting()
    for step in range(8):
        expected(regression()[step % 3][0])
    assert_identical(list(model.buffers()), list(expected.buffers()))


@pytest.mark.parametrize("solver", VARIANCE_REDUCED)
def test_a_buffer_that_is_assigned_is_refused_among_tensors(solver):
    """It would move in snapshots, and twice a step."""
    model = Counting()
    run = Run(solver, model, regression(), buffers=model.buffers())
    with pytest.raises(RuntimeError, match=r"shape \(\).*buffers=model"):
        run.steps(8)
        run.snapshot()


def norm_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("solver", ["SVRG", "LPSVRG"])
def test_a_model_that_was_moved_says_so_and_trains_on_with_its_new_buffers(solver):
    """``model.to(...)`` makes new buffers, and leaves the parameters what they were."""
    model = norm_net()
    run = Run(solver, model, regression(), buffers=model.buffers())
    model.double()
    with pytest.raises(RuntimeError, match="no buffer of the model any more"):
        run.snapshot()
    run.optimizer.buffers = model.buffers()
    run.steps(5)
    assert model[1].num_batches_tracked == 5
    given_model = norm_net()
    other = Run(solver, given_model, regression(), buffers=given_model)
    given_model.double()
    assert_identical(other.steps(5).values, run.values)
    assert_identical(list(given_model.buffers()), list(model.buffers()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("as_model", [True, False])
def test_a_copy_has_the_buffers_of_its_own_model(as_model, copied):
    model = norm_net().double()
    given = model if as_model else model.buffers()
    run = Run("SVRG", model, regression(), buffers=given).steps(3)
    twin = copy.copy(run)
    twin.optimizer, twin.model = copied((run.optimizer, run.model))
    twin.steps(4)
    assert run.model[1].num_batches_tracked == 3
    assert twin.model[1].num_batches_tracked == 7


def test_measuring_and_looking_for_an_overflow_leave_buffers_that_are_assigned():
    model = Counting()
    run = Run("SGD", model, regression())
    batches = halp.data.Batches(*(torch.cat(t) for t in zip(*regression(), strict=True)), 8)
    before = [model.passes, model.mean.clone()]
    measure_training(model, batches, lambda out, y: (out.squeeze(-1) - y).square().mean())
    assert model.passes is before[0]
    assert torch.equal(model.mean, before[1])
    with Watch(model, run.optimizer) as watch:
        watch._first_in(lambda: mean_squares(model, *regression()[0]))
    assert model.passes is before[0]
