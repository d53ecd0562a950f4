"""Each solver is a real optimizer, and follows its recurrence whatever one does with it."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

import halp
from tests.optim.runs import (
    BIT_CENTERED,
    LOW_PRECISION,
    SOLVERS,
    SOLVERS_AND_ROUNDINGS,
    WITH_SNAPSHOTS,
    Run,
    assert_close,
    assert_identical,
    linear,
    mean_squares,
    mlp,
    reference,
    reference_period,
    regression,
)
from tests.rarely import rarely_but

FP16 = {"format": "fp16", "rounding": "near"}

each_solver = pytest.mark.parametrize("solver", SOLVERS)
each_solver_and_rounding = pytest.mark.parametrize(("solver", "rounding"), SOLVERS_AND_ROUNDINGS)


# The recurrences. Nothing is rounded, so that each solver must agree with the formulas.


@pytest.mark.parametrize("make_model", [linear, mlp], ids=["linear", "mlp"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@each_solver
def test_solver_without_rounding_follows_its_recurrence(solver, options, make_model):
    expected = reference(
        make_model(), regression(), 25, T=reference_period(solver), lr=0.05, **options
    )
    run = Run(solver, make_model(), regression(), lr=0.05, **options).steps(25)
    assert_close(run.values, expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_solver
def test_maximizing_the_negative_loss_is_minimizing_the_loss(solver, momentum):
    """Weight decay still pulls towards zero, as in torch.optim.SGD."""

    def negative(model, x, y):
        return -mean_squares(model, x, y)

    options = {"lr": 0.05, "momentum": momentum, "weight_decay": 0.1}
    minimized = Run(solver, mlp(), regression(), **options).steps(20)
    maximized = Run(solver, mlp(), regression(), **options, loss=negative, maximize=True).steps(20)
    assert_close(maximized.values, minimized.values)


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 1e-2},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.5, "maximize": True, "weight_decay": 1e-2},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_sgd_is_torch_sgd_bit_for_bit(options, foreach):
    batches = regression(torch.float32)
    ours, theirs = mlp(torch.float32), mlp(torch.float32)
    run = Run("SGD", ours, batches, lr=0.05, foreach=foreach, **options)
    reference_optimizer = torch.optim.SGD(theirs.parameters(), 0.05, foreach=foreach, **options)
    for step in range(20):
        run.step()
        reference_optimizer.zero_grad()
        mean_squares(theirs, *batches[step % len(batches)]).backward()
        reference_optimizer.step()
        assert_identical(list(ours.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize("T", [1, 7, 50], ids=lambda T: f"T={T}")
@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_any_period_is_followed(solver, T):
    """An epoch is three batches: 50 steps are longer than that."""
    expected = reference(
        mlp(), regression(), 60, T=reference_period(solver, T), lr=0.05, momentum=0.5
    )
    run = Run(solver, mlp(), regression(), lr=0.05, T=T, momentum=0.5).steps(60)
    assert_close(run.values, expected)


# Learning rate schedules.


SCHEDULES = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=5, gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, T_max=20, eta_min=1e-3),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=30),
}


def scheduled_options(make_schedule, steps: int) -> list[tuple[float, float]]:
    """lr and momentum of each step, from torch.optim.SGD under the same schedule."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.05, momentum=0.9)
    schedule = make_schedule(optimizer)
    options = []
    for _ in range(steps):
        options.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        schedule.step()
    return options


@pytest.mark.parametrize("name", SCHEDULES)
@each_solver
def test_schedulers_drive_it(solver, name):
    """Stepped after every inner step: lr (and OneCycleLR's momentum) change inside cycles."""
    options = scheduled_options(SCHEDULES[name], 25)
    assert len({lr for lr, _ in options}) > 3
    expected = reference(
        mlp(),
        regression(),
        25,
        T=reference_period(solver),
        lr=lambda step, _: options[step][0],
        momentum=lambda step, _: options[step][1],
    )
    run = Run(solver, mlp(), regression(), lr=0.05, momentum=0.9)
    schedule = SCHEDULES[name](run.optimizer)
    run.steps(25, after_each=schedule.step)
    assert_close(run.values, expected)


def test_lr_changed_inside_a_cycle_is_svrg_with_the_same_change():
    def train(solver):
        run = Run(solver, mlp(), regression(), lr=0.05, T=10, momentum=0.9, weight_decay=0.1)
        for lr in (0.05, 0.01, 0.2):
            run.optimizer.param_groups[0]["lr"] = lr
            run.steps(4)
        return run.values

    expected = reference(
        mlp(),
        regression(),
        12,
        T=10,
        lr=lambda step, _: (0.05, 0.01, 0.2)[step // 4],
        momentum=0.9,
        weight_decay=0.1,
    )
    assert_close(train("SVRG"), expected)
    assert_close(train("BitCenterSVRG"), train("SVRG"))


@each_solver
def test_lr_may_be_a_tensor(solver):
    from_tensor = Run(solver, mlp(), regression(), lr=torch.tensor(0.05, dtype=torch.float64))
    from_number = Run(solver, mlp(), regression(), lr=0.05)
    assert_close(from_tensor.steps(9).values, from_number.steps(9).values)


# Parameters of every kind.


def two_groups(model: nn.Module) -> list[dict]:
    return [
        {"params": model[0].parameters(), "lr": 0.02, "weight_decay": 0.3},
        {"params": model[2].parameters(), "momentum": 0.5},
    ]


@each_solver
def test_parameter_groups_have_options_of_their_own(solver):
    expected = reference(
        mlp(),
        regression(),
        25,
        T=reference_period(solver),
        lr=lambda _, name: 0.02 if name.startswith("0") else 0.05,
        weight_decay=lambda _, name: 0.3 if name.startswith("0") else 0.01,
        momentum=lambda _, name: 0.9 if name.startswith("0") else 0.5,
    )
    run = Run(
        solver, mlp(), regression(), lr=0.05, momentum=0.9, weight_decay=0.01, groups=two_groups
    )
    assert_close(run.steps(25).values, expected)


@each_solver
def test_added_parameter_group_trains_with_its_own_options(solver):
    """The second layer stands still for five steps, and then joins in after a new snapshot."""
    run = Run(solver, mlp(), regression(), lr=0.05, T=5, groups=lambda m: list(m[0].parameters()))
    before = [halp.value(p) for p in run.model[2].parameters()]
    run.steps(5)
    assert_identical([halp.value(p) for p in run.model[2].parameters()], before)
    run.optimizer.add_param_group({"params": run.model[2].parameters(), "lr": 0.02})
    assert run.optimizer.snapshot_due == (solver in WITH_SNAPSHOTS)
    expected = reference(
        mlp(),
        regression(),
        12,
        T=reference_period(solver, 5),
        lr=lambda step, name: 0.05 if name.startswith("0") else 0.02 * (step >= 5),
    )
    assert_close(run.steps(7).values, expected)


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_parameter_group_added_inside_a_cycle_makes_a_snapshot_due(solver):
    run = Run(solver, mlp(), regression(), groups=lambda m: list(m[0].parameters())).steps(2)
    assert not run.optimizer.snapshot_due
    run.optimizer.add_param_group({"params": run.model[2].parameters()})
    assert run.optimizer.snapshot_due
    run.steps(2)


def freeze_first_layer(model: nn.Module) -> nn.Module:
    model[0].requires_grad_(False)
    return model


@each_solver
def test_frozen_layer_stands_still(solver):
    expected = reference(
        freeze_first_layer(mlp()),
        regression(),
        25,
        T=reference_period(solver),
        momentum=0.9,
        weight_decay=0.1,
        lr=0.05,
    )
    model = freeze_first_layer(mlp())
    before = [p.detach().clone() for p in model[0].parameters()]
    run = Run(solver, model, regression(), lr=0.05, momentum=0.9, weight_decay=0.1).steps(25)
    assert_identical([halp.value(p) for p in run.model[0].parameters()], before)
    assert_close(run.values, expected)


class WithUnused(nn.Module):
    """``unused`` gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = mlp()
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("precision", [{"rounding": "void"}, FP16], ids=["void", "fp16"])
@each_solver
def test_parameter_without_gradient_is_left_alone(solver, precision):
    """Weight decay included, as in torch.optim.SGD."""
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "precision": precision}
    run = Run(solver, WithUnused(), regression(), **options).steps(15)
    assert torch.equal(halp.value(run.model.unused), torch.ones(3, dtype=torch.float64))
    alone = Run(solver, mlp(), regression(), **options).steps(15)
    assert_identical([halp.value(p) for p in run.model.used.parameters()], alone.values)


class OneHeadABatch(nn.Module):
    """Which of two heads gets a gradient depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.heads = nn.ModuleList(nn.Linear(5, 1) for _ in range(2)).double()

    def forward(self, x):
        return self.heads[int(x[0, 0] > 0)](x)


@each_solver
def test_parameter_with_a_gradient_in_some_batches_only(solver):
    """Variance-reduced solvers take the gradient that is missing as zero; others skip the step."""
    batches = regression(sizes=(2, 2, 2, 2, 2))
    assert len({bool(x[0, 0] > 0) for x, _ in batches}) == 2
    expected = reference(
        OneHeadABatch(), batches, 25, T=reference_period(solver), lr=0.05, momentum=0.5
    )
    run = Run(solver, OneHeadABatch(), batches, lr=0.05, momentum=0.5).steps(25)
    assert_close(run.values, expected)


def tied() -> nn.Module:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1)).double()
    model[2].weight = model[0].weight
    return model


@each_solver
def test_tied_weights_stay_tied_and_get_both_gradients(solver):
    expected = reference(
        tied(), regression(), 20, T=reference_period(solver), lr=0.05, momentum=0.5
    )
    run = Run(solver, tied(), regression(), lr=0.05, momentum=0.5).steps(20)
    assert run.model[2].weight is run.model[0].weight
    assert_close(run.values, expected)


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_optimizer_made_before_bit_center_works(solver):
    early_model, late_model = mlp(), mlp()
    early = getattr(halp.optim, solver)(early_model.parameters(), 0.05, 0.9, 0.1, T=7)
    halp.bit_center(early_model)
    run = Run(solver, late_model, regression(), lr=0.05, momentum=0.9, weight_decay=0.1,
              precision={}).steps(15)  # fmt: skip
    other = Run.__new__(Run)
    other.model, other.optimizer, other.batches = early_model, early, regression()
    other.loss, other.count = mean_squares, 0
    assert_identical(other.steps(15).values, run.values)


# Where it converges to.


def full_gradient(run: Run, weight_decay: float = 0.0) -> torch.Tensor:
    """Gradient at the run's point of ``‖Xw + b − y‖²/2n + λ/2·‖(w, b)‖²``, written out."""
    x, y = (torch.cat(parts) for parts in zip(*run.batches, strict=True))
    w, b = run.values
    residual = x.double() @ w.double()[0] + b.double() - y.double()
    gradient = torch.cat([x.double().t() @ residual, residual.sum()[None]]) / len(x)
    return gradient + weight_decay * torch.cat([w.double()[0], b.double()])


def halp_run(rounding: str, **options) -> Run:
    precision = {"rounding": rounding, "offset_dtype": torch.float64}
    options = {"lr": 0.1, "precision": precision, **options}
    batches = regression(torch.float32, sizes=(16, 16, 5))
    return Run("BitCenterSVRG", linear(torch.float32), batches, **options)


@pytest.mark.parametrize("rounding", ["near", "stoc"])
def test_a_short_last_batch_counts_by_its_samples(rounding):
    run = halp_run(rounding, T=10).steps(500)
    assert full_gradient(run).norm() < 1e-10
    run.batches = run.batches[-1:]
    assert full_gradient(run).norm() > 1e-2, "another weight of the last batch moves the optimum"


@pytest.mark.parametrize("T", rarely_but([7], [1, 7, 50]), ids=lambda T: f"T={T}")
def test_halp_in_fp16_converges_for_any_period(T):
    run = halp_run("near", T=T).steps(1000)
    assert full_gradient(run).norm() < 1e-10


@pytest.mark.parametrize(
    "rounding, momentum",
    rarely_but([("stoc", 0.5)], itertools.product(["near", "stoc"], [0.0, 0.5])),
)
def test_weight_decay_in_fp16_converges_to_the_regularized_optimum(rounding, momentum):
    lr = 0.1 * (1 - momentum)
    run = halp_run(rounding, T=10, weight_decay=0.1, momentum=momentum, lr=lr).steps(500)
    assert full_gradient(run, weight_decay=0.1).norm() < 1e-10
    assert full_gradient(run).norm() > 1e-2, "the optimum without weight decay lies elsewhere"


# What a snapshot holds, and for how long.


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_past_T_steps_go_on_about_the_old_center(solver):
    run = Run(solver, mlp(), regression(), lr=0.05, T=3, momentum=0.5)
    run.snapshot()
    due = []
    for _ in range(8):
        run.step()
        due.append(run.optimizer.snapshot_due)
    assert due == [False, False, True, True, True, True, True, True]
    expected = reference(
        mlp(), regression(), 8, T=reference_period(solver, 8), lr=0.05, momentum=0.5
    )
    assert_close(run.values, expected)


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_an_early_snapshot_starts_a_new_cycle(solver):
    run = Run(solver, mlp(), regression(), lr=0.05, T=7, momentum=0.5)
    for _ in range(5):
        run.snapshot()
        assert not run.optimizer.snapshot_due
        for _ in range(3):
            run.step()
    expected = reference(
        mlp(), regression(), 15, T=reference_period(solver, 3), lr=0.05, momentum=0.5
    )
    assert_close(run.values, expected)


@each_solver
def test_snapshot_due_is_false_for_sgd_alone(solver):
    run = Run(solver, mlp(), regression())
    assert run.optimizer.snapshot_due == (solver in WITH_SNAPSHOTS)
    run.steps(1)
    assert not run.optimizer.snapshot_due
    run.steps(6)
    assert run.optimizer.snapshot_due == (solver in WITH_SNAPSHOTS)


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_evaluation_inside_a_cycle_changes_nothing(solver):
    def evaluate(run):
        x, _ = run.batches[0]
        with torch.no_grad(), halp.materialize(run.model):
            run.model(x)
        run.model.state_dict()

    evaluated, left_alone = (
        Run(solver, mlp(), regression(), momentum=0.9, precision=FP16) for _ in range(2)
    )
    evaluated.steps(11, after_each=lambda: evaluate(evaluated))
    assert_identical(evaluated.values, left_alone.steps(11).values)


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_loading_a_model_state_makes_a_snapshot_due(solver):
    run = Run(solver, mlp(), regression(), precision=FP16).steps(3)
    other = mlp(seed=9)
    run.model.load_state_dict(other.state_dict())
    assert run.optimizer.snapshot_due
    assert_identical(run.values, list(other.parameters()))
    assert all(not p.delta.any() for p in run.model.parameters())


# Saving and going on.


def saved_and_loaded(*states: dict) -> list[dict]:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumable(solver: str, rounding: str, seed: int, dtype=torch.float32) -> Run:
    precision = {"format": "fp16", "rounding": rounding, "seed": 5}
    if solver in BIT_CENTERED:
        precision["offset_dtype"] = torch.float64
    return Run(
        solver,
        mlp(dtype, seed=seed),
        regression(torch.float32),
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-2,
        precision=precision,
    )


#: Loading a bit-centered model's state last is asking for a new snapshot: see below.
RESUMED = [
    (solver, rounding, order)
    for solver, rounding in SOLVERS_AND_ROUNDINGS
    for order in (("before",) if solver in BIT_CENTERED else ("before", "after"))
]


@pytest.mark.parametrize(("solver", "rounding", "model_state"), RESUMED)
def test_resumed_in_mid_cycle_it_goes_on_bit_for_bit(solver, rounding, model_state):
    """In a fresh model and optimizer, through a file; the rest of the cycle and two more."""
    original = resumable(solver, rounding, seed=1).steps(10)
    model_dict, optimizer_dict = saved_and_loaded(
        original.model.state_dict(), original.optimizer.state_dict()
    )
    resumed = resumable(solver, rounding, seed=2)
    resumed.count = original.count
    if model_state == "before":
        resumed.model.load_state_dict(model_dict)
    resumed.optimizer.load_state_dict(optimizer_dict)
    if model_state == "after":
        resumed.model.load_state_dict(model_dict)
    assert not resumed.optimizer.snapshot_due
    for _ in range(15):
        assert resumed.optimizer.snapshot_due == original.optimizer.snapshot_due
        assert_identical(resumed.steps(1).values, original.steps(1).values)


@each_solver_and_rounding
def test_loaded_over_a_run_in_progress_it_goes_on_bit_for_bit(solver, rounding):
    """Rolling back: the optimizer has a momentum, a snapshot and a random stream of its own."""
    run = resumable(solver, rounding, seed=1).steps(10)
    states = saved_and_loaded(run.model.state_dict(), run.optimizer.state_dict())
    count, expected = run.count, run.steps(15).values
    run.model.load_state_dict(states[0])
    run.optimizer.load_state_dict(states[1])
    run.count = count
    assert_identical(run.steps(15).values, expected)


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_model_state_loaded_last_goes_on_as_from_an_early_snapshot(solver, rounding):
    """``model.load_state_dict`` sets w̃ to w̃ + z, z to zero, and makes a snapshot due."""
    original = resumable(solver, rounding, seed=1).steps(10)
    states = saved_and_loaded(original.model.state_dict(), original.optimizer.state_dict())
    resumed = resumable(solver, rounding, seed=2)
    resumed.count = original.count
    resumed.optimizer.load_state_dict(states[1])
    resumed.model.load_state_dict(states[0])
    assert resumed.optimizer.snapshot_due
    original.snapshot()
    assert_identical(resumed.steps(15).values, original.steps(15).values)


@each_solver
def test_a_state_saved_before_the_first_snapshot_resumes_too(solver):
    original = resumable(solver, "near", seed=1)
    states = saved_and_loaded(original.model.state_dict(), original.optimizer.state_dict())
    resumed = resumable(solver, "near", seed=2)
    resumed.model.load_state_dict(states[0])
    resumed.optimizer.load_state_dict(states[1])
    assert resumed.optimizer.snapshot_due == original.optimizer.snapshot_due
    assert_identical(resumed.steps(10).values, original.steps(10).values)


@each_solver
def test_loading_keeps_the_dtype_of_every_tensor(solver):
    """A float32 model has float64 offsets, which PyTorch's own loading would narrow."""
    original = resumable(solver, "near", seed=1)
    if solver in BIT_CENTERED:
        for p in original.model.parameters():
            p.offset.add_(2.0**-50)  # a bit that float32 does not hold beside those of a weight
    original.steps(10)
    saved = saved_and_loaded(original.optimizer.state_dict())[0]
    resumed = resumable(solver, "near", seed=2)
    resumed.optimizer.load_state_dict(saved)
    again = resumed.optimizer.state_dict()
    assert again["state"].keys() == saved["state"].keys()
    for index, entries in saved["state"].items():
        assert again["state"][index].keys() == entries.keys()
        names = list(entries)
        assert_identical([again["state"][index][n] for n in names], [entries[n] for n in names])
    if solver in BIT_CENTERED:
        offset = saved["state"][0]["offset"]
        assert offset.dtype == torch.float64
        assert not torch.equal(offset, offset.float().double()), "float64 must be needed here"


@each_solver
def test_a_loaded_state_shares_no_memory_with_the_dict(solver):
    original = resumable(solver, "near", seed=1).steps(10)
    state = original.optimizer.state_dict()
    resumed = resumable(solver, "near", seed=2)
    resumed.model.load_state_dict(original.model.state_dict())
    resumed.optimizer.load_state_dict(state)
    resumed.count = original.count
    copied = copy.deepcopy(state)
    resumed.steps(3)
    for index, entries in copied["state"].items():
        assert_identical([state["state"][index][n] for n in entries], list(entries.values()))


@each_solver_and_rounding
def test_a_deep_copy_goes_on_alike(solver, rounding):
    """And the two do not share anything: the copy does not notice what the original does."""
    original = resumable(solver, rounding, seed=1).steps(10)
    twin = copy.copy(original)
    twin.model, twin.optimizer = copy.deepcopy((original.model, original.optimizer))
    assert twin.optimizer.snapshot_due == original.optimizer.snapshot_due
    expected = original.steps(15).values
    assert_identical(twin.steps(15).values, expected)


@each_solver_and_rounding
def test_pickling_goes_on_alike(solver, rounding):
    original = resumable(solver, rounding, seed=1).steps(10)
    twin = copy.copy(original)
    twin.model, twin.optimizer = pickle.loads(pickle.dumps((original.model, original.optimizer)))
    assert twin.optimizer.snapshot_due == original.optimizer.snapshot_due
    expected = original.steps(15).values
    assert_identical(twin.steps(15).values, expected)


@each_solver
def test_a_deep_copy_under_a_scheduler_goes_on_alike(solver):
    original = resumable(solver, "near", seed=1)
    schedule = StepLR(original.optimizer, step_size=4, gamma=0.5)
    original.steps(10, after_each=schedule.step)
    twin = copy.copy(original)
    twin.model, twin.optimizer, twin_schedule = copy.deepcopy(
        (original.model, original.optimizer, schedule)
    )
    expected = original.steps(15, after_each=schedule.step).values
    assert_identical(twin.steps(15, after_each=twin_schedule.step).values, expected)
    assert twin.optimizer.param_groups[0]["lr"] == original.optimizer.param_groups[0]["lr"]


# Steps.


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("solver", ["SGD", *BIT_CENTERED])
def test_a_step_needs_no_closure(solver, rounding):
    precision = {"rounding": rounding}
    with_closure, without = (
        Run(solver, mlp(), regression(), momentum=0.9, precision=precision) for _ in range(2)
    )
    for step in range(10):
        with_closure.steps(1)
        if without.optimizer.snapshot_due:
            without.snapshot()
        without.closure(*without.batches[step % len(without.batches)])
        assert without.optimizer.step() is None
    if rounding == "near":
        assert_identical(without.values, with_closure.values)
    else:
        assert_close(without.values, with_closure.values, 1e-2)


def test_lp_sgd_without_a_closure_takes_the_gradients_of_an_emulated_pass():
    precision = {"format": "fp16", "rounding": "near"}
    with_closure, without = (
        Run("LPSGD", mlp(), regression(), momentum=0.9, precision=precision) for _ in range(2)
    )
    for step in range(10):
        with_closure.step()
        with halp.emulate("fp16"):
            without.closure(*without.batches[step % len(without.batches)])
        without.optimizer.step()
        assert_identical(without.values, with_closure.values)


@each_solver
def test_step_returns_the_plain_detached_loss_before_the_step(solver):
    run = Run(solver, mlp(), regression())
    run.steps(3)
    with halp.materialize(run.model), torch.no_grad():
        expected = mean_squares(run.model, *run.batches[0])
    loss = run.step()
    assert type(loss) is torch.Tensor and not loss.requires_grad
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


@each_solver
def test_step_hooks_run_once_a_step(solver):
    run = Run(solver, mlp(), regression())
    seen = []
    pre = run.optimizer.register_step_pre_hook(lambda o, *_: seen.append(("pre", run.values[0])))
    post = run.optimizer.register_step_post_hook(lambda o, *_: seen.append(("post", run.values[0])))
    run.steps(2)
    assert [name for name, _ in seen] == ["pre", "post", "pre", "post"]
    values = [value for _, value in seen]
    assert not torch.equal(values[0], values[1]) and not torch.equal(values[2], values[3])
    assert torch.equal(values[1], values[2])
    pre.remove()
    post.remove()
    run.steps(1)
    assert len(seen) == 4


@pytest.mark.parametrize("set_to_none", [True, False])
@each_solver
def test_zero_grad_clears_the_gradients(solver, set_to_none):
    run = Run(solver, mlp(), regression(), precision=FP16).steps(1)
    run.closure(*run.batches[0])
    run.optimizer.zero_grad(set_to_none=set_to_none)
    for p in run.model.parameters():
        assert p.grad is None if set_to_none else not halp.value(p.grad).any()


@each_solver
def test_a_closure_that_zeroes_instead_of_dropping_gradients_is_the_same(solver):
    def train(set_to_none):
        run = Run(solver, mlp(), regression(), momentum=0.9, precision=FP16)

        def closure(*batch):
            run.optimizer.zero_grad(set_to_none=set_to_none)
            loss = mean_squares(run.model, *batch)
            loss.backward()
            return loss

        run.closure = closure
        return run.steps(15).values

    assert_identical(train(set_to_none=False), train(set_to_none=True))


def clipped_by_hand(max_norm: float, weight_decay: float, steps: int) -> list[torch.Tensor]:
    """SVRG on a linear model, with v scaled down to ``max_norm`` over both parameters."""
    batches = regression()
    w, b = (p.detach().clone() for p in linear().parameters())
    x_all, y_all = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def gradient(w, b, x, y):
        residual = x @ w[0] + b - y
        return torch.cat([x.t() @ residual, residual.sum()[None]]) / len(x)

    clipped = 0
    for step in range(steps):
        if step % 7 == 0:
            w0, b0 = w, b
            full = gradient(w, b, x_all, y_all)
        x, y = batches[step % 3]
        v = gradient(w, b, x, y) - gradient(w0, b0, x, y) + full
        v = v + weight_decay * torch.cat([w[0], b])
        if v.norm() > max_norm:
            v, clipped = v * (max_norm / v.norm()), clipped + 1
        w, b = w - 0.1 * v[None, :-1], b - 0.1 * v[-1:]
    assert 3 < clipped < steps - 3, "both kinds of steps must be among them"
    return [w, b]


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_max_norm_clips_the_variance_reduced_gradient(weight_decay):
    run = Run(
        "BitCenterSVRG", linear(), regression(), lr=0.1, max_norm=0.4, weight_decay=weight_decay
    )
    assert_close(run.steps(25).values, clipped_by_hand(0.4, weight_decay, 25))


def test_max_norm_is_over_all_parameter_groups_together():
    def train(groups):
        return Run("BitCenterSVRG", linear(), regression(), max_norm=0.4, groups=groups).steps(25)

    apart = train(lambda m: [{"params": [m.weight]}, {"params": [m.bias]}])
    assert_close(apart.values, train(None).values)


def test_max_norm_does_not_touch_the_full_gradient():
    run = Run("BitCenterSVRG", linear(), regression(), max_norm=1e-3)
    run.snapshot()
    before = [run.optimizer.state[p]["full_gradient"].clone() for p in run.model.parameters()]
    run.step()
    after = [run.optimizer.state[p]["full_gradient"] for p in run.model.parameters()]
    assert_identical(after, before)


def test_every_low_precision_solver_is_listed():
    assert set(LOW_PRECISION) == {"LPSGD", "LPSVRG", "BitCenterSGD", "BitCenterSVRG"}
    assert sorted(SOLVERS) == sorted(halp.optim.__all__)
