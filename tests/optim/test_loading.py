"""States are loaded as PyTorch's are: hooks see and change them, and names decide what is whose."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halp
from tests.optim.runs import (
    BIT_CENTERED,
    LOW_PRECISION,
    SOLVERS,
    WITH_SNAPSHOTS,
    Run,
    assert_close,
    assert_identical,
    regression,
)

each_solver = pytest.mark.parametrize("solver", SOLVERS)


def net(seed: int = 1) -> nn.Module:
    """Two layers of one shape, whose states could be taken for each other's."""
    torch.manual_seed(seed)
    layers = nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)
    return nn.Sequential(*layers)


def named(model: nn.Module) -> list:
    return list(model.named_parameters())


def backwards(model: nn.Module) -> list:
    return named(model)[::-1]


def run_of(solver: str, seed: int = 1, groups=named, **options) -> Run:
    return Run(
        solver,
        net(seed),
        regression(torch.float32),
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-2,
        groups=groups,
        precision={"format": "fp16", "rounding": "near"},
        **options,
    )


def resumed(original: Run, run: Run) -> Run:
    run.model.load_state_dict(original.model.state_dict())
    run.optimizer.load_state_dict(original.optimizer.state_dict())
    run.count = original.count
    return run


def snapshot_of(optimizer) -> tuple[dict, dict]:
    state = copy.deepcopy(optimizer.state_dict())
    return state["state"], {**state["solver"], "groups": state["param_groups"]}


def assert_same_state(found: tuple, expected: tuple) -> None:
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    for number, entry in expected[0].items():
        assert found[0][number].keys() == entry.keys()
        for key, value in entry.items():
            same = torch.equal if isinstance(value, Tensor) else lambda a, b: a == b
            assert same(found[0][number][key], value), (number, key)


# Hooks.


def halved(optimizer: Any, state_dict: dict) -> dict:
    entries = {
        number: {k: v * 0.5 if isinstance(v, Tensor) else v for k, v in entry.items()}
        for number, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": entries}


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
