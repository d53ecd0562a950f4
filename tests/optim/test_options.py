"""An option that a solver does not have is refused, wherever it comes from, and never ignored."""

from typing import Any

import pytest
import torch
from torch import nn

import halp
from tests.optim.runs import (
    BIT_CENTERED,
    SOLVERS,
    WITH_SNAPSHOTS,
    Run,
    assert_identical,
    linear,
    mean_squares,
    mlp,
    regression,
)

each_solver = pytest.mark.parametrize("solver", SOLVERS)

FOREIGN = {
    "dampening": 0.5,
    "differentiable": True,
    "fused": True,
    "capturable": True,
    "decoupled_weight_decay": True,
}
OF_THE_SOLVER = [
    *((solver, option) for solver in WITH_SNAPSHOTS for option in ("T", "buffers")),
    *((solver, o) for solver in ("LPSGD", "LPSVRG") for o in ("format", "rounding", "scale")),
    ("BitCenterSVRG", "mu"),
    ("BitCenterSVRG", "max_norm"),
]


def made(solver: str, model: nn.Module, **group) -> Any:
    if solver in BIT_CENTERED:
        halp.bit_center(model)
    options = {"T": 7} if solver in WITH_SNAPSHOTS else {}
    groups = [{"params": list(model.parameters()), **group}]
    return getattr(halp.optim, solver)(groups, lr=0.1, momentum=0.9, **options)


@pytest.mark.parametrize("option", FOREIGN)
@each_solver
def test_an_option_of_pytorchs_that_it_lacks_is_refused_in_a_group(solver, option):
    value, words = FOREIGN[option], f"{solver} has no {option}.*{FOREIGN[option]}"
    with pytest.raises(ValueError, match=words):
        made(solver, linear(), **{option: value})
    solver_made = made(solver, linear(), **{option: type(value)(0)})  # as PyTorch's states have it
    with pytest.raises(ValueError, match=words):
        solver_made.add_param_group({"params": [nn.Parameter(torch.ones(1))], option: value})
    assert len(solver_made.param_groups) == 1


@each_solver
def test_an_option_that_is_set_later_is_refused_by_the_next_step(solver):
    run = Run(solver, linear(), regression()).steps(2)
    run.optimizer.param_groups[0]["dampening"] = 0.5
    before = run.values
    with pytest.raises(ValueError, match=r"dampening=0\.5"):
        run.step()
    assert_identical(run.values, before)


@pytest.mark.parametrize(("solver", "option"), OF_THE_SOLVER)
def test_an_option_of_the_whole_solver_is_refused_in_a_group(solver, option):
    with pytest.raises(ValueError, match=f"{option}=.* whole solver"):
        made(solver, linear(), **{option: 1})


@each_solver
def test_what_schedulers_and_users_note_in_a_group_stays(solver):
    optimizer = made(solver, linear(), initial_lr=0.1, name="first", lr_scale=0.5)
    assert optimizer.param_groups[0]["lr_scale"] == 0.5


# States of PyTorch's SGD.


def of_pytorch(model: nn.Module, **options) -> dict:
    """The state after three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **options)
    for batch in regression():
        optimizer.zero_grad()
        mean_squares(model, *batch).backward()
        optimizer.step()
    return optimizer.state_dict()


def as_written_by(version: str, state: dict) -> dict:
    """What older versions of PyTorch did not write."""
    later = {"1.10": ("maximize", "foreach", "differentiable", "fused"), "1.13": ("fused",)}
    groups = [
        {k: v for k, v in group.items() if k not in later[version]}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


@pytest.mark.parametrize("option", ["dampening", "differentiable", "fused"])
@pytest.mark.parametrize("solver", ["SGD", "LPSGD"])
def test_a_state_with_an_option_that_it_lacks_is_refused_and_nothing_is_loaded(solver, option):
    state = of_pytorch(mlp(), momentum=0.9)
    state["param_groups"][0][option] = FOREIGN[option]
    run = Run(solver, mlp(), regression(), momentum=0.5)
    with pytest.raises(ValueError, match=option):
        run.optimizer.load_state_dict(state)
    assert run.optimizer.param_groups[0]["momentum"] == 0.5
    assert not run.optimizer.state


@pytest.mark.parametrize("version", ["1.10", "1.13"])
@pytest.mark.parametrize("solver", ["SGD", "LPSGD"])
def test_a_state_of_an_older_pytorch_trains_on_as_in_pytorch(solver, version):
    """What it lacks is what PyTorch takes for it, whatever this solver was made with."""
    theirs, ours = mlp(), mlp()
    state = as_written_by(version, of_pytorch(theirs, momentum=0.9, nesterov=True))
    ours.load_state_dict(theirs.state_dict())
    run = Run(solver, ours, regression(), momentum=0.9, maximize=version == "1.10")
    run.optimizer.load_state_dict(state)
    other = torch.optim.SGD(theirs.parameters(), lr=1.0, maximize=version == "1.10")
    other.load_state_dict(state)
    for batch in regression():
        other.zero_grad()
        mean_squares(theirs, *batch).backward()
        other.step()
        run.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("solver", ["SGD", "LPSGD"])
def test_a_state_with_none_for_momentum_is_one_without(solver):
    state = of_pytorch(mlp())
    state["state"] = {i: {"momentum_buffer": None} for i in range(4)}
    run, other = (Run(solver, mlp(), regression(), momentum=0.9) for _ in range(2))
    run.optimizer.load_state_dict(state)
    assert not any(run.optimizer.state.values())
    run.optimizer.param_groups[0].update(lr=0.1, momentum=0.9)
    assert_identical(run.steps(4).values, other.steps(4).values)


def test_low_precision_holds_the_momentum_of_a_state_of_pytorch_on_its_grid():
    run = Run("LPSGD", mlp(), regression(), precision={"format": "fp16"})
    state = of_pytorch(mlp(), momentum=0.9)
    run.optimizer.load_state_dict(state)
    for i, p in enumerate(run.model.parameters()):
        buffer, saved = run.optimizer.state[p]["momentum_buffer"], state["state"][i]
        assert torch.equal(buffer, halp.quantize(saved["momentum_buffer"], "fp16"))
        assert not torch.equal(buffer, saved["momentum_buffer"])


@pytest.mark.parametrize("kind", ["RMSprop", "Muon", "Adam"])
@pytest.mark.parametrize("solver", ["SGD", "LPSGD"])
def test_the_state_of_another_optimizer_with_momentum_is_refused(solver, kind):
    """Before a step there is little in it that tells it apart."""
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this PyTorch has no {kind}")
    model = nn.Linear(3, 3, bias=False)
    state = getattr(torch.optim, kind)(model.parameters(), lr=0.1).state_dict()
    with pytest.raises(ValueError, match="no state dict of"):
        getattr(halp.optim, solver)(model.parameters(), lr=0.1).load_state_dict(state)


@pytest.mark.parametrize("option", ["lr", "momentum", "weight_decay"])
@each_solver
def test_a_state_without_an_option_that_every_step_reads_is_refused(solver, option):
    run = Run(solver, linear(), regression()).steps(2)
    state = run.optimizer.state_dict()
    del state["param_groups"][0][option]
    with pytest.raises(ValueError, match=f"group 0 of the state dict has no '{option}'"):
        run.optimizer.load_state_dict(state)
    run.steps(2)


# What closures return.


@pytest.mark.parametrize("what", ["tuple", "dict", "vector"])
@each_solver
def test_a_closure_that_returns_more_than_the_loss_is_told_and_nothing_moves(solver, what):
    run = Run(solver, mlp(), regression(), momentum=0.9).steps(2)
    loss_of = run.closure

    def closure(*batch):
        loss = loss_of(*batch)
        kinds = {
            "tuple": (loss, run.model(batch[0])),
            "dict": {"loss": loss},
            "vector": torch.ones(3),
        }
        return kinds[what]

    run.closure = closure
    before = run.values
    with pytest.raises(TypeError, match=r"closure of step\(\) must return the mean loss.*returned"):
        run.step()
    assert_identical(run.values, before)
    if solver in WITH_SNAPSHOTS and solver != "BitCenterSGD":  # which does not run it
        with pytest.raises(TypeError, match=r"closure of snapshot\(\) must return the mean loss"):
            run.snapshot()


@each_solver
def test_a_closure_may_return_a_number_or_nothing(solver):
    runs = [Run(solver, mlp(), regression()) for _ in range(3)]
    for run, of in zip(runs, (lambda x: x, lambda x: x.item(), lambda _: None), strict=True):
        loss_of = run.closure
        run.closure = lambda *batch, loss_of=loss_of, of=of: of(loss_of(*batch))
        run.steps(8)
    assert_identical(runs[1].values, runs[0].values)
    assert_identical(runs[2].values, runs[0].values)


# Parameters that a model no longer has.


def assign_anew(model: nn.Module) -> None:
    """Put plain parameters in the place of a model's, as ``load_state_dict(assign=True)`` does.

    A bit-centered model refuses that itself, but not an assignment by hand.
    """
    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(halp.value(p)))


@pytest.mark.parametrize("solver", ["SVRG", "BitCenterSVRG"])
def test_parameters_that_were_assigned_anew_are_named_as_a_cause(solver):
    run = Run(solver, linear(), regression())
    assign_anew(run.model)
    with pytest.raises(ValueError, match=r"assign=True.*make a new solver"):
        run.snapshot()


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_plain_parameters_that_were_assigned_are_told_how_they_come_about(solver):
    run = Run(solver, linear(), regression())
    assign_anew(run.model)
    optimizer = getattr(halp.optim, solver)(run.model.parameters(), lr=0.1, T=3)
    with pytest.raises(TypeError, match=r"bit_center\(model\).*again where .*assign=True"):
        optimizer.snapshot(regression(), run.closure)
