"""What is remembered of a snapshot follows the parameters that are trained."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import halp
from halp.training import Checkpointer, Stopped, Watch
from tests.optim.runs import (
    BIT_CENTERED,
    SOLVERS,
    VARIANCE_REDUCED,
    WITH_SNAPSHOTS,
    Run,
    assert_close,
    assert_identical,
    mean_squares,
    mlp,
    regression,
)

FP16 = {"format": "fp16", "rounding": "near"}
CACHED = {"rounding": "void", "offsets": "cached"}
OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}

each_solver = pytest.mark.parametrize("solver", SOLVERS)
each_with_snapshots = pytest.mark.parametrize("solver", WITH_SNAPSHOTS)

#: Whether the first layer is trained, by step; there are snapshots every 7 steps at least.
SCHEDULES = {
    "frozen in a cycle": lambda step: step < 3,
    "frozen and unfrozen in a cycle": lambda step: step not in (2, 3, 4),
    "frozen at a snapshot, and unfrozen": lambda step: step >= 4,
    "frozen over a snapshot, and unfrozen": lambda step: not 5 <= step < 10,
    "unfrozen and frozen again": lambda step: step in (4, 5) or step > 9,
}


class ByHand:
    """SGD or SVRG, momentum and weight decay, with a first layer that is frozen at times.

    In float64, with gradients by autograd of a functional call. ``snapshots`` are the steps before
    which one was taken.
    """

    def __init__(self, model: nn.Module, batches, *, T: int, reduced: bool, cached: bool) -> None:
        self.model, self.batches, self.T = model, batches, T
        self.reduced, self.cached = reduced, cached
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.buffers: dict[str, Tensor] = {}
        self.snapshots: list[int] = []
        self.known: set[str] = set()

    def gradients(self, at: dict[str, Tensor], batch) -> dict[str, Tensor]:
        leaves = {name: w.clone().requires_grad_() for name, w in at.items()}
        loss = mean_squares(lambda x: functional_call(self.model, leaves, (x,)), *batch)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def snapshot(self, step: int, trained: set[str]) -> None:
        self.snapshots.append(step)
        self.center, self.known = dict(self.weights), trained
        total = sum(len(x) for x, _ in self.batches)
        parts = [(len(b[0]) / total, self.gradients(self.center, b)) for b in self.batches]
        self.full = {name: sum(share * g[name] for share, g in parts) for name in self.weights}

    def is_due(self, step: int, trained: set[str]) -> bool:
        changed = trained != self.known if self.cached else not trained <= self.known
        return not self.snapshots or step - self.snapshots[-1] >= self.T or changed

    def step(self, step: int, trained: set[str]) -> None:
        batch = self.batches[step % len(self.batches)]
        here, there = self.gradients(self.weights, batch), self.gradients(self.center, batch)
        for name in trained & self.known:
            v = here[name] - there[name] + self.full[name] if self.reduced else here[name]
            v = v + OPTIONS["weight_decay"] * self.weights[name]
            if name in self.buffers:
                v = OPTIONS["momentum"] * self.buffers[name] + v
            self.buffers[name] = v
            self.weights[name] = self.weights[name] - OPTIONS["lr"] * v

    def run(self, steps: int, is_trained) -> list[Tensor]:
        for step in range(steps):
            names = set(self.weights)
            trained = names if is_trained(step) else {n for n in names if not n.startswith("0")}
            if self.is_due(step, trained):
                self.snapshot(step, trained)
            self.step(step, trained)
        return list(self.weights.values())


def driven(run: Run, steps: int, is_trained) -> list[int]:
    """Drive the loop of the README; return before which steps a snapshot was due."""
    snapshots = []
    for step in range(steps):
        run.model[0].requires_grad_(is_trained(step))
        if run.optimizer.snapshot_due:
            snapshots.append(step)
            run.snapshot()
        run.step()
    return snapshots


@pytest.mark.parametrize("name", SCHEDULES)
@each_solver
def test_a_layer_frozen_at_times_follows_the_recurrence(solver, name):
    reduced, snapshots = solver in VARIANCE_REDUCED, solver in WITH_SNAPSHOTS
    hand = ByHand(mlp(), regression(), T=7 if snapshots else 1, reduced=reduced, cached=False)
    expected = hand.run(20, SCHEDULES[name])
    run = Run(solver, mlp(), regression(), **OPTIONS)
    due = driven(run, 20, SCHEDULES[name])
    assert due == (hand.snapshots if snapshots else [])
    assert_close(run.values, expected)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_with_cached_offsets_every_change_makes_a_snapshot_due(solver, name):
    """They are of the operations that train these layers, and of no others."""
    reduced = solver in VARIANCE_REDUCED
    hand = ByHand(mlp(), regression(), T=7, reduced=reduced, cached=True)
    expected = hand.run(20, SCHEDULES[name])
    run = Run(solver, mlp(), regression(), precision=CACHED, **OPTIONS)
    assert driven(run, 20, SCHEDULES[name]) == hand.snapshots
    assert_close(run.values, expected)


@pytest.mark.parametrize("trained_first", [True, False])
@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_a_cached_step_after_a_change_is_refused_until_there_is_a_snapshot(solver, trained_first):
    run = Run(solver, mlp(), regression(), precision=CACHED, **OPTIONS)
    run.model[0].requires_grad_(trained_first)
    run.steps(2)
    run.model[0].requires_grad_(not trained_first)
    assert run.optimizer.snapshot_due
    before = run.values
    with pytest.raises(RuntimeError, match=r"frozen or unfrozen.*snapshot_due"):
        run.step()
    assert_identical(run.values, before)
    run.steps(2)


def test_a_convolution_frozen_in_a_cycle_of_cached_offsets_trains_on():
    """Its backward pass is one operation with a mask: another operation, with it frozen."""

    def net() -> nn.Module:
        torch.manual_seed(1)
        layers = nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Conv1d(2, 2, 2), nn.Flatten(), nn.Linear(6, 1)
        return nn.Sequential(*layers).double()

    batches = [(x[:, None], y) for x, y in regression()]
    found = []
    for offsets in ("cached", "on-site"):
        precision = {"rounding": "void", "offsets": offsets}
        run = Run("BitCenterSVRG", net(), batches, precision=precision, **OPTIONS).steps(3)
        run.model[2].bias.requires_grad_(False)
        assert run.optimizer.snapshot_due == (offsets == "cached")
        run.snapshot()
        found.append(run.steps(4).values)
    assert_close(*found)


@pytest.mark.parametrize("precision", [{"rounding": "void"}, FP16], ids=["void", "fp16"])
@each_solver
def test_a_layer_with_a_gradient_of_before_does_not_move_once_frozen(solver, precision):
    run = Run(solver, mlp(), regression(), precision=precision, **OPTIONS)

    def loss_of(*batch):
        for p in run.model.parameters():
            if p.requires_grad:
                p.grad = None
        loss = mean_squares(run.model, *batch)
        loss.backward()
        return loss

    run.closure = loss_of
    run.steps(3)
    run.model[0].requires_grad_(False)
    before, moving = run.values[:2], run.values[2]
    run.steps(9)
    assert_identical(run.values[:2], before)
    assert not torch.equal(run.values[2], moving)


@pytest.mark.parametrize("solver", ["SGD", "LPSGD", *BIT_CENTERED])
def test_without_a_closure_a_frozen_layer_does_not_move_either(solver):
    run = Run(solver, mlp(), regression(), precision=FP16, **OPTIONS).steps(2)
    assert run.model[0].weight.grad is not None
    run.model[0].requires_grad_(False)
    before, gradient = run.values[:2], halp.value(run.model[0].weight.grad)
    run.optimizer.step()
    assert_identical(run.values[:2], before)
    assert torch.equal(halp.value(run.model[0].weight.grad), gradient)


def test_a_watch_does_not_stop_at_what_lies_in_the_gradient_of_a_frozen_layer():
    run = Run("SGD", mlp(), regression(), **OPTIONS).steps(2)
    run.model[0].requires_grad_(False)
    run.model[0].weight.grad.fill_(float("nan"))
    before = run.values
    with Watch(run.model, run.optimizer):
        run.optimizer.step()
    assert_identical(run.values[:2], before[:2])
    assert not torch.equal(run.values[2], before[2])


def test_a_frozen_layer_draws_no_random_bits():
    """Another's bits do not depend on what lies in its gradient."""

    def train(lingering: bool) -> list[Tensor]:
        run = Run("LPSGD", mlp(), regression(), precision={"rounding": "stoc"}, **OPTIONS)
        run.model[0].requires_grad_(False)
        for batch in run.batches:
            run.closure(*batch)
            if lingering:
                run.model[0].weight.grad = torch.ones_like(run.model[0].weight)
            run.optimizer.step()
        return run.values

    assert_identical(train(lingering=True), train(lingering=False))


@each_with_snapshots
def test_a_layer_unfrozen_without_a_snapshot_stands_still_and_biases_no_other(solver):
    """As past T, steps go on about the old center, and the snapshot stays due."""
    run, other = (Run(solver, mlp(), regression(), **OPTIONS) for _ in range(2))
    for r in (run, other):
        r.model[0].requires_grad_(False)
        r.steps(2)
    run.model[0].requires_grad_(True)
    for _ in range(3):
        assert run.optimizer.snapshot_due
        run.step()
        other.step()
    assert_identical(run.values, other.values)
    run.steps(1)
    assert not run.optimizer.snapshot_due
    assert not torch.equal(run.values[0], other.values[0])


# Parameters that come, go, and move to other groups.


@each_with_snapshots
def test_a_parameter_put_in_the_place_of_another_makes_a_snapshot_due(solver):
    """The full gradient is of the one that was there."""
    run = Run(solver, mlp(), regression(), **OPTIONS).steps(2)
    new = mlp(seed=5)
    if solver in BIT_CENTERED:
        halp.bit_center(new, "fp16", "void")
    run.model[2].weight = new[2].weight
    members = run.optimizer.param_groups[0]["params"]
    members[2] = new[2].weight
    assert run.optimizer.snapshot_due
    before = run.values
    with pytest.raises(RuntimeError, match="needs a snapshot first"):
        run.step()
    assert_identical(run.values, before)
    state = run.optimizer.state_dict()
    assert state["solver"]["position"] is None
    assert state["state"].keys() <= {0, 1, 2, 3}
    run.steps(2)
    assert not torch.equal(run.values[2], before[2])


@each_with_snapshots
def test_a_parameter_taken_out_of_its_group_makes_a_snapshot_due(solver):
    run = Run(solver, mlp(), regression(), **OPTIONS).steps(2)
    run.optimizer.param_groups[0]["params"].pop(0)
    assert run.optimizer.snapshot_due
    with pytest.raises(RuntimeError, match="needs a snapshot first"):
        run.step()
    before = run.values[0]
    run.steps(2)
    assert torch.equal(run.values[0], before)


@each_with_snapshots
def test_a_parameter_that_changes_its_group_goes_on_in_its_cycle(solver):
    def two_groups(model):
        return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]

    run, other = (Run(solver, mlp(), regression(), groups=two_groups, **OPTIONS) for _ in "ab")
    run.steps(2)
    other.steps(2)
    first, second = run.optimizer.param_groups
    second["params"].append(first["params"].pop(0))
    assert not run.optimizer.snapshot_due
    assert_identical(run.steps(4).values, other.steps(4).values)


def test_steps_after_w_was_written_to_are_refused_until_there_is_a_snapshot():
    """The full gradient of BitCenterSVRG is of the w̃ that was there; that of SVRG stays."""
    for solver in ("SVRG", "BitCenterSVRG"):
        run = Run(solver, mlp(), regression(), **OPTIONS).steps(3)
        run.model.load_state_dict(mlp(seed=7).state_dict())
        assert run.optimizer.snapshot_due == (solver == "BitCenterSVRG")
        if solver == "BitCenterSVRG":
            before = run.values
            with pytest.raises(RuntimeError, match="written to since the snapshot"):
                run.step()
            assert_identical(run.values, before)
        run.steps(1)


# Saving and going on.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@each_with_snapshots
def test_a_copy_knows_what_was_frozen(solver, copied):
    run = Run(solver, mlp(), regression(), **OPTIONS)
    run.model[0].requires_grad_(False)
    run.steps(2)
    twin = copy.copy(run)
    twin.model, twin.optimizer = copied((run.model, run.optimizer))
    for r in (run, twin):
        assert not r.optimizer.snapshot_due
        r.model[0].requires_grad_(True)
        assert r.optimizer.snapshot_due
    assert_identical(twin.steps(5).values, run.steps(5).values)


@pytest.mark.parametrize("then", [True, False], ids=["unfrozen", "frozen"])
@each_with_snapshots
def test_a_state_of_the_middle_of_a_cycle_may_be_loaded_with_other_layers_frozen(solver, then):
    run = Run(solver, mlp(), regression(), precision=FP16, **OPTIONS)
    run.model[0].requires_grad_(not then)
    run.steps(3)
    resumed = Run(solver, mlp(seed=2), regression(), precision=FP16, **OPTIONS)
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.optimizer.load_state_dict(run.optimizer.state_dict())
    resumed.count = run.count
    for r in (run, resumed):
        r.model[0].requires_grad_(then)
        assert r.optimizer.snapshot_due == then
    before = run.values[0]
    assert_identical(resumed.steps(6).values, run.steps(6).values)
    assert torch.equal(run.values[0], before) != then


@pytest.mark.parametrize(
    ("solver", "offsets"),
    [("LPSVRG", {}), *((s, {"offsets": o}) for s in BIT_CENTERED for o in ("on-site", "cached"))],
)
def test_a_checkpoint_of_a_cycle_with_a_layer_frozen_goes_on_bit_for_bit(solver, offsets, tmp_path):
    """Frozen at the first snapshot, trained from step 3, frozen from step 5, in cycles of 7."""
    precision = {"format": "fp16", "rounding": "stoc", **offsets}

    def train(folder, stop_after: int) -> Run:
        run = Run(solver, mlp(torch.float32), regression(torch.float32), precision=precision,
                  **OPTIONS)  # fmt: skip
        checkpointer = Checkpointer(folder, run.model, run.optimizer, run.batches)
        checkpointer.restore()
        try:
            for _ in checkpointer.epochs(3):
                for batch in checkpointer.batches():
                    run.model[0].requires_grad_(3 <= checkpointer.steps < 5)
                    if run.optimizer.snapshot_due:
                        run.snapshot()
                    run.optimizer.step(lambda batch=batch: run.closure(*batch))
                    if checkpointer.steps + 1 == stop_after:
                        checkpointer.stop()
        except Stopped:
            pass
        return run

    expected = train(tmp_path / "whole", 100).values
    for stop_after in (2, 4, 6):
        train(tmp_path / str(stop_after), stop_after)
        assert_identical(train(tmp_path / str(stop_after), 100).values, expected)
