"""Where both sides name their parameters, names decide what is whose, or the state is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import halp
from tests.optim.runs import SOLVERS, assert_identical
from tests.optim.states import (
    assert_same_state,
    backwards,
    halved,
    named,
    net,
    resumed,
    run_of,
    snapshot_of,
)

each_solver = pytest.mark.parametrize("solver", SOLVERS)


# Names.


@each_solver
def test_a_state_with_its_parameters_in_another_order_is_loaded_by_name(solver):
    """And goes on bit for bit."""
    original = run_of(solver).steps(9)
    run = resumed(original, run_of(solver, seed=2, groups=backwards))
    assert run.optimizer.param_groups[0]["param_names"] == [n for n, _ in backwards(run.model)]
    assert run.optimizer.snapshot_due == original.optimizer.snapshot_due
    assert_identical(run.steps(12).values, original.steps(12).values)


def test_pytorchs_own_states_are_loaded_by_name():
    model, ours = net(), net(2)
    sgd = torch.optim.SGD(named(model), lr=0.1, momentum=0.9)
    model(torch.ones(1, 5)).sum().backward()
    sgd.step()
    solver = halp.optim.SGD(backwards(ours), lr=0.1, momentum=0.9)
    solver.load_state_dict(sgd.state_dict())
    for p, q in zip(model.parameters(), ours.parameters(), strict=True):
        assert torch.equal(sgd.state[p]["momentum_buffer"], solver.state[q]["momentum_buffer"])


def layers_apart(order=(0, 2, 4)):
    def groups(model):
        return [
            {"params": [(f"{i}.{n}", p) for n, p in model[i].named_parameters()], "lr": 0.01 * i}
            for i in order
        ]

    return groups


@each_solver
def test_groups_in_another_order_are_loaded_by_name_options_too(solver):
    original = run_of(solver, groups=layers_apart()).steps(9)
    run = resumed(original, run_of(solver, seed=2, groups=layers_apart((4, 0, 2))))
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.04, 0.0, 0.02]
    assert_identical(run.steps(12).values, original.steps(12).values)


@each_solver
def test_without_names_on_both_sides_the_order_decides(solver):
    original = run_of(solver).steps(9)
    run = resumed(original, run_of(solver, seed=2, groups=lambda m: list(m.parameters())))
    assert_identical(run.steps(5).values, original.steps(5).values)
    again = resumed(run, run_of(solver, seed=3))
    assert_identical(again.steps(5).values, run.steps(5).values)


def test_names_that_differ_are_refused_by_name():
    original, run = run_of("BitCenterSVRG").steps(3), run_of("BitCenterSVRG").steps(2)
    state = original.optimizer.state_dict()
    names = state["param_groups"][0]["param_names"]
    state["param_groups"][0]["param_names"] = [f"module.{name}" for name in names]
    before = snapshot_of(run.optimizer)
    with pytest.raises(ValueError) as error:
        run.optimizer.load_state_dict(state)
    for words in ("'0.bias'", "and 3 more", "'module.0.bias'", "register_load_state_dict_pre_hook"):
        assert words in str(error.value)
    assert_same_state(snapshot_of(run.optimizer), before)

    def hook(optimizer, state_dict):
        (group,) = state_dict["param_groups"]
        names = [name.removeprefix("module.") for name in group["param_names"]]
        return {**state_dict, "param_groups": [{**group, "param_names": names}]}

    run.optimizer.register_load_state_dict_pre_hook(hook)
    run.optimizer.load_state_dict(state)
    assert_same_state(snapshot_of(run.optimizer), snapshot_of(original.optimizer))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (lambda m: [{"params": named(m)[:3]}, {"params": named(m)[3:]}], "other groups"),
        (lambda m: [{"params": named(m)[:4]}], "has '4.bias', '4.weight' besides"),
    ],
    ids=["other groups", "fewer"],
)
@each_solver
def test_names_in_other_groups_are_refused(solver, groups, words):
    """They would be given other options."""
    state = run_of(solver, groups=layers_apart()).optimizer.state_dict()
    run = run_of(solver, groups=groups)
    before = snapshot_of(run.optimizer)
    with pytest.raises(ValueError, match=words):
        run.optimizer.load_state_dict(state)
    assert_same_state(snapshot_of(run.optimizer), before)


def test_names_that_occur_twice_are_no_names():
    def twice(model):
        return [("same", p) for p in model.parameters()]

    original = run_of("SGD", groups=twice).steps(3)
    run = resumed(original, run_of("SGD", seed=2, groups=twice))
    assert_identical(run.steps(3).values, original.steps(3).values)
    with pytest.raises(ValueError, match="lacks"):
        run_of("SGD").optimizer.load_state_dict(original.optimizer.state_dict())
    state = original.optimizer.state_dict()
    state["param_groups"][0]["param_names"] = ["a", "b", "b", "a", "b", "b"]
    run = run_of("SGD", groups=lambda m: list(zip("abbabb"[::-1], m.parameters(), strict=True)))
    with pytest.raises(ValueError, match="occur twice"):
        run.optimizer.load_state_dict(state)


# Hooks and names.


def by_name(optimizer: Any, state_dict: dict) -> dict:
    """Put entries in the optimizer's order, and leave names as they were saved."""
    names = state_dict["param_groups"][0]["param_names"]
    own = optimizer.param_groups[0]["param_names"]
    entries = {i: state_dict["state"][names.index(name)] for i, name in enumerate(own)}
    return {**state_dict, "state": entries}


def adapted(optimizer: Any, state_dict: dict) -> dict:
    """The way of PyTorch's tutorial: into a copy of the optimizer's own state dict."""
    result = copy.deepcopy(optimizer.state_dict())
    for key, option in state_dict["param_groups"][0].items():
        if key not in ("params", "param_names"):
            result["param_groups"][0][key] = option
    names = state_dict["param_groups"][0]["param_names"]
    for i, name in enumerate(result["param_groups"][0]["param_names"]):
        result["state"][i] = copy.deepcopy(state_dict["state"][names.index(name)])
    return {**result, "solver": state_dict["solver"]}


@pytest.mark.parametrize("hook", [by_name, adapted])
@each_solver
def test_a_hook_that_matches_by_name_itself_is_heard(solver, hook):
    original = run_of(solver).steps(9)
    run = run_of(solver, seed=2, groups=backwards)
    run.optimizer.register_load_state_dict_pre_hook(hook)
    resumed(original, run)
    assert_identical(run.steps(5).values, original.steps(5).values)


def test_a_hook_that_changes_entries_and_not_the_order_of_names_is_asked_for_it():
    original = run_of("SVRG").steps(9)
    run = run_of("SVRG", seed=2, groups=backwards)
    run.optimizer.register_load_state_dict_pre_hook(halved)
    with pytest.raises(ValueError, match=r"cannot be told .* 'param_names' in the order"):
        resumed(original, run)


@pytest.mark.parametrize("offsets", ["on-site", "cached"])
def test_each_model_goes_on_with_its_own_random_stream(offsets):
    """Two models under one solver, whose parameters come in another order."""

    class Both(nn.Module):
        def __init__(self, seeds=(1, 2)) -> None:
            super().__init__()
            self.first, self.second = (
                halp.bit_center(nn.Linear(5, 1), rounding="stoc", seed=s, offsets=offsets)
                for s in seeds
            )

    def groups(model):
        return named(model)

    def state_of(groups) -> tuple[Both, Any]:
        model = Both()
        return model, halp.optim.BitCenterSVRG(groups(model), lr=0.1, T=5)

    model, solver = state_of(named)
    model.first.weight.context.rounder.position = 70
    model.second.weight.context.rounder.position = 11
    other, loaded = state_of(backwards)
    loaded.load_state_dict(solver.state_dict())
    assert other.first.weight.context.rounder.position == 70
    assert other.second.weight.context.rounder.position == 11
