"""States are loaded as PyTorch's are: hooks see and change them, and all that they hold."""

import copy

import pytest
import torch
from torch import Tensor, nn

import halp
from tests.optim.runs import (
    BIT_CENTERED,
    LOW_PRECISION,
    SOLVERS,
    WITH_SNAPSHOTS,
    assert_close,
    assert_identical,
)
from tests.optim.states import (
    assert_same_state,
    halved,
    resumed,
    run_of,
    snapshot_of,
)

each_solver = pytest.mark.parametrize("solver", SOLVERS)


# Hooks.


@each_solver
def test_what_a_hook_returns_is_loaded(solver):
    """Every tensor of it: momentum, snapshot, full gradient, w̃ and z."""
    original = run_of(solver).steps(9)
    run = run_of(solver, seed=2)
    run.optimizer.register_load_state_dict_pre_hook(halved)
    resumed(original, run)
    expected = halved(None, original.optimizer.state_dict())["state"]
    found = run.optimizer.state_dict()["state"]
    for number, entry in expected.items():
        tensors = {k: v for k, v in entry.items() if isinstance(v, Tensor)}
        assert "momentum_buffer" in tensors
        assert_identical([found[number][k] for k in tensors], list(tensors.values()))


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_a_hook_that_changes_the_solvers_entry_is_heard(solver):
    original = run_of(solver).steps(9)
    run = run_of(solver)
    hook = lambda o, s: {**s, "solver": {**s["solver"], "position": None}}  # noqa: E731
    run.optimizer.register_load_state_dict_pre_hook(hook)
    resumed(original, run)
    assert run.optimizer.snapshot_due
    assert not original.optimizer.snapshot_due


@each_solver
def test_a_hook_may_write_into_the_dict_that_it_gets(solver):
    original = run_of(solver).steps(9)
    run = run_of(solver)

    def hook(optimizer, state_dict):
        groups = copy.deepcopy(state_dict["param_groups"])
        groups[0]["lr"] = 0.125
        state_dict["param_groups"] = groups

    run.optimizer.register_load_state_dict_pre_hook(hook)
    state = original.optimizer.state_dict()
    run.optimizer.load_state_dict(state)
    assert run.optimizer.param_groups[0]["lr"] == 0.125
    assert state["param_groups"][0]["lr"] == 0.05


@each_solver
def test_a_hook_makes_a_refused_state_fit_and_a_fitting_one_refused(solver):
    """Its result is what is checked."""
    original = run_of(solver).steps(9)
    narrow = original.optimizer.state_dict()
    first = {**narrow["state"][0], "momentum_buffer": torch.zeros(3)}
    narrow["state"] = {**narrow["state"], 0: first}
    run = run_of(solver)
    before = snapshot_of(run.optimizer)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        run.optimizer.load_state_dict(narrow)
    handle = run.optimizer.register_load_state_dict_pre_hook(lambda o, s: narrow)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        run.optimizer.load_state_dict(original.optimizer.state_dict())
    assert_same_state(snapshot_of(run.optimizer), before)
    handle.remove()
    fits = original.optimizer.state_dict()
    run.optimizer.register_load_state_dict_pre_hook(lambda o, s: fits)
    run.optimizer.load_state_dict(narrow)
    assert_same_state(snapshot_of(run.optimizer), snapshot_of(original.optimizer))


@each_solver
def test_where_a_hook_raises_nothing_is_loaded(solver):
    original, run = run_of(solver).steps(9), run_of(solver, seed=2).steps(3)
    before = snapshot_of(run.optimizer)

    def hook(optimizer, state_dict):
        raise KeyError("no")

    run.optimizer.register_load_state_dict_pre_hook(hook)
    with pytest.raises(KeyError):
        run.optimizer.load_state_dict(original.optimizer.state_dict())
    assert_same_state(snapshot_of(run.optimizer), before)


@each_solver
def test_hooks_after_loading_find_everything_loaded(solver):
    original, run = run_of(solver).steps(9), run_of(solver, seed=2)
    seen = []
    run.optimizer.register_load_state_dict_post_hook(lambda o: seen.append(snapshot_of(o)))
    resumed(original, run)
    assert len(seen) == 1
    assert_same_state(seen[0], snapshot_of(original.optimizer))


@each_solver
def test_hooks_of_saving_get_the_whole_state_and_what_they_return_is_saved(solver):
    run = run_of(solver).steps(9)
    whole = snapshot_of(run.optimizer)
    calls = []

    def hook(optimizer, state_dict):
        found = state_dict["state"], {**state_dict["solver"], "groups": state_dict["param_groups"]}
        assert_same_state(found, whole)
        calls.append("after")
        return {**state_dict, "note": "mine"}

    run.optimizer.register_state_dict_pre_hook(lambda o: calls.append("before"))
    run.optimizer.register_state_dict_post_hook(hook)
    state = run.optimizer.state_dict()
    assert calls == ["before", "after"]
    assert state["note"] == "mine"
    assert_same_state(snapshot_of(run.optimizer), whole)


# What a state must hold.


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_a_state_of_the_middle_of_a_cycle_without_its_snapshot_is_refused(solver):
    """The full gradient would be gone, and the position would say it is there."""
    original, run = run_of(solver).steps(9), run_of(solver, seed=2)
    before = snapshot_of(run.optimizer)
    run.optimizer.register_load_state_dict_pre_hook(lambda o, s: {**s, "state": {}})
    with pytest.raises(ValueError, match="middle of a cycle, and lacks"):
        run.optimizer.load_state_dict(original.optimizer.state_dict())
    assert_same_state(snapshot_of(run.optimizer), before)


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_a_delta_that_a_hook_changes_is_a_delta(solver):
    """Of a frozen layer the state says that it is zero."""

    def moved(optimizer, state_dict):
        first = state_dict["state"][0]
        entry = {**first, "delta": first["delta"] + 0.5}
        return {**state_dict, "state": {**state_dict["state"], 0: entry}}

    original, run = run_of(solver), run_of(solver)
    run.optimizer.register_load_state_dict_pre_hook(moved)
    assert original.model[0].weight.is_constant
    resumed(original, run)
    x = torch.ones(2, 5)
    expected = nn.functional.linear(x, run.values[0], run.values[1])
    assert not run.model[0].weight.is_constant
    assert_close([halp.value(run.model[0](x))], [expected], 1e-3)


@pytest.mark.parametrize("solver", LOW_PRECISION)
def test_schedulers_and_others_hold_the_groups_that_are_loaded_into(solver):
    run = run_of(solver)
    groups, state = run.optimizer.param_groups, run.optimizer.state
    first = groups[0]
    run.optimizer.load_state_dict(run_of(solver).steps(3).optimizer.state_dict())
    assert run.optimizer.param_groups is groups
    assert run.optimizer.state is state
    assert groups[0] is first


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_a_state_with_one_position_for_all_parameters_is_of_one_stream(solver):
    """As earlier versions saved it."""
    original, run = (run_of(solver).steps(3) for _ in range(2))
    state = original.optimizer.state_dict()
    state["solver"]["stream_positions"] = [17]
    run.optimizer.load_state_dict(state)
    assert run.model[0].weight.context.rounder.position == 17
    before = snapshot_of(run.optimizer)
    state["solver"]["stream_positions"] = [17, 18]
    with pytest.raises(ValueError, match="2 positions of random streams for 6 parameters"):
        run.optimizer.load_state_dict(state)
    assert_same_state(snapshot_of(run.optimizer), before)
