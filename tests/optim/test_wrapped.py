"""A wrapper that copies a solver's attributes, and leaves steps to it, is the solver."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import halp
from halp.training import Watch
from tests.optim.runs import (
    BIT_CENTERED,
    SOLVERS,
    WITH_SNAPSHOTS,
    Run,
    assert_identical,
    mlp,
    regression,
)

each_solver = pytest.mark.parametrize("solver", SOLVERS)
each_with_snapshots = pytest.mark.parametrize("solver", WITH_SNAPSHOTS)


class Wrapper:
    """As training frameworks wrap optimizers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        own = ("load_state_dict", "state_dict", "step", "zero_grad", "__del__")
        self.__dict__ = {k: v for k, v in vars(optimizer).items() if k not in own}
        kind = type(optimizer)
        self.__class__ = type("Wrapped" + kind.__name__, (self.__class__, kind), {})  # type: ignore[assignment]
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


def wrapped(solver: str, model: nn.Module | None = None, rounding: str = "stoc") -> Run:
    run = plain(solver, model, rounding)
    run.optimizer = Wrapper(run.optimizer)
    return run


def plain(solver: str, model: nn.Module | None = None, rounding: str = "stoc") -> Run:
    precision = {"format": "fp16", "rounding": rounding, "seed": 3}
    model = model or mlp(torch.float32)
    return Run(
        solver, model, regression(torch.float32), lr=0.05, momentum=0.9, precision=precision, T=4
    )


@each_solver
def test_the_loop_gives_the_same_bits(solver):
    run, other = wrapped(solver), plain(solver)
    assert isinstance(run.optimizer, getattr(halp.optim, solver))
    for _ in range(11):
        assert run.optimizer.snapshot_due == other.optimizer.snapshot_due
        assert_identical(run.steps(1).values, other.steps(1).values)


@each_with_snapshots
def test_either_may_take_the_snapshot(solver):
    run, other = wrapped(solver), plain(solver)
    inner = run.optimizer._optimizer
    run.steps(3)
    other.steps(3)
    inner.snapshot(run.batches, run.closure)
    other.snapshot()
    for r in (run, other):
        r.step()
    assert_identical(run.steps(9).values, other.steps(9).values)


@each_with_snapshots
def test_what_is_set_on_one_is_set_on_the_other(solver):
    run = wrapped(solver).steps(2)
    inner = run.optimizer._optimizer
    run.optimizer.T = 2
    assert inner.T == 2
    assert inner.snapshot_due
    run.optimizer.T = 4
    run.model[0].weight.requires_grad_(False)
    run.snapshot()
    run.model[0].weight.requires_grad_(True)
    assert inner.snapshot_due
    assert run.optimizer.snapshot_due


@each_solver
def test_states_are_the_solvers_own(solver):
    """Saved by one and loaded by the other, or through the wrapper."""
    run, other = wrapped(solver).steps(6), plain(solver).steps(6)
    states = [copy.deepcopy(o.state_dict()) for o in (run.optimizer, other.optimizer)]
    assert states[0]["solver"] == states[1]["solver"]
    expected = other.steps(7).values
    run.steps(2)
    run.model.load_state_dict(plain(solver).steps(6).model.state_dict())
    run.optimizer.load_state_dict(states[1])
    run.count = 6
    assert_identical(run.steps(7).values, expected)
    third = plain(solver)
    third.model.load_state_dict(plain(solver).steps(6).model.state_dict())
    third.optimizer.load_state_dict(states[0])
    third.count = 6
    assert_identical(third.steps(7).values, expected)


@each_with_snapshots
def test_a_group_added_through_it_makes_a_snapshot_due_for_both(solver):
    run = wrapped(solver).steps(2)
    new = nn.Linear(2, 2)
    if solver in BIT_CENTERED:
        halp.bit_center(new)
    run.optimizer.add_param_group({"params": new.parameters()})
    assert run.optimizer.snapshot_due
    assert run.optimizer._optimizer.snapshot_due


@each_solver
def test_a_watch_given_the_wrapper_watches_its_steps(solver):
    run = wrapped(solver)
    with Watch(run.model, run.optimizer) as watch:
        run.steps(3)
        assert watch.steps == 3
    run.steps(1)
    assert watch.steps == 3


def test_a_copy_is_not_shared():
    run = plain("SVRG").steps(2)
    twin = copy.copy(run.optimizer)
    run.steps(2)
    assert run.optimizer.snapshot_due
    assert not twin.snapshot_due
