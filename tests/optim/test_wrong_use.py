"""Wrong use raises the right exception, in a sentence that says what to do instead."""

import pytest
import torch
from torch import nn

import halp
from tests.optim.runs import (
    BIT_CENTERED,
    LOW_PRECISION,
    PLAIN,
    SOLVERS,
    WITH_SNAPSHOTS,
    Run,
    linear,
    mean_squares,
    regression,
)

NAN = float("nan")


def make(solver: str, model: nn.Module | None = None, **options):
    model = model or linear()
    if solver in BIT_CENTERED and not halp.bitcenter.is_bit_centered(model):
        halp.bit_center(model)
    options = {"lr": 0.1, **({"T": 7} if solver in WITH_SNAPSHOTS else {}), **options}
    return getattr(halp.optim, solver)(model.parameters(), **options)


def says(error, *words: str) -> None:
    """The message is one sentence or two, with these words in it."""
    message = str(error.value)
    assert "\n" not in message and len(message) < 400, message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


# Numbers.


@pytest.mark.parametrize("number", [-0.1, NAN, float("inf"), -1e-300])
@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_negative_or_infinite_option_is_refused(solver, name, number):
    with pytest.raises(ValueError) as error:
        make(solver, **{name: number})
    says(error, name, "0 or a positive number", repr(number))


@pytest.mark.parametrize("value", ["0.1", None, True, [0.1]])
@pytest.mark.parametrize("solver", SOLVERS)
def test_an_lr_that_is_no_number_is_refused(solver, value):
    with pytest.raises(TypeError) as error:
        make(solver, lr=value)
    says(error, "lr", "number", repr(value))


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_options_of_a_group_are_checked_too(solver, name):
    model = linear()
    optimizer = make(solver, model)
    with pytest.raises(ValueError) as error:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: -1.0})
    says(error, name, "-1.0")


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_options_of_a_group_given_at_once_are_checked_too(solver, name):
    model = linear()
    if solver in BIT_CENTERED:
        halp.bit_center(model)
    options = {"T": 7} if solver in WITH_SNAPSHOTS else {}
    groups = [{"params": model.parameters(), name: -1.0}]
    with pytest.raises(ValueError) as error:
        getattr(halp.optim, solver)(groups, lr=0.1, **options)
    says(error, name, "-1.0")


@pytest.mark.parametrize("T", [0, -1, 1.5, True, "600", None, NAN])
@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_a_period_that_is_no_positive_count_is_refused(solver, T):
    with pytest.raises((ValueError, TypeError)) as error:
        make(solver, T=T)
    says(error, "T must be a positive number of steps", repr(T))


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_the_period_has_no_default(solver):
    model = linear()
    with pytest.raises(TypeError, match="'T'"):
        getattr(halp.optim, solver)(model.parameters(), lr=0.1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_nesterov_needs_momentum(solver):
    with pytest.raises(ValueError) as error:
        make(solver, nesterov=True)
    says(error, "nesterov", "momentum")


@pytest.mark.parametrize("max_norm", [0, -1.0, NAN])
def test_a_max_norm_that_is_not_positive_is_refused(max_norm):
    with pytest.raises(ValueError) as error:
        make("BitCenterSVRG", max_norm=max_norm)
    says(error, "max_norm must be positive", repr(max_norm))


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_parameters_are_refused(solver):
    options = {"T": 7} if solver in WITH_SNAPSHOTS else {}
    with pytest.raises(ValueError, match="empty parameter list"):
        getattr(halp.optim, solver)([], lr=0.1, **options)


# Formats, roundings, scales.


def low_precision(solver: str, **precision):
    """Where the solver takes its precision: in bit_center, or itself."""
    if solver in BIT_CENTERED:
        return halp.bit_center(linear(), **precision)
    return make(solver, **precision)


@pytest.mark.parametrize("solver", LOW_PRECISION)
def test_an_unknown_format_is_refused_with_the_known_ones(solver):
    with pytest.raises(ValueError) as error:
        low_precision(solver, format="fp17")
    says(error, "unknown format 'fp17'", "fp16", "bf16", "fp8_e4m3", "fp32")


@pytest.mark.parametrize("solver", LOW_PRECISION)
def test_a_format_that_is_no_name_is_refused(solver):
    with pytest.raises(TypeError) as error:
        low_precision(solver, format=16)
    says(error, "format", "16")


@pytest.mark.parametrize("rounding", ["nearest", "", None])
@pytest.mark.parametrize("solver", LOW_PRECISION)
def test_an_unknown_rounding_is_refused_with_the_known_ones(solver, rounding):
    with pytest.raises(ValueError) as error:
        low_precision(solver, rounding=rounding)
    says(error, f"unknown rounding {rounding!r}", "near", "stoc", "void")


@pytest.mark.parametrize("scale", ["big", 0, -1.0, NAN, float("inf")])
@pytest.mark.parametrize("solver", LOW_PRECISION)
def test_a_scale_that_is_not_positive_is_refused(solver, scale):
    with pytest.raises(ValueError) as error:
        low_precision(solver, scale=scale)
    says(error, "scale", "None", '"auto"', "positive", repr(scale))


@pytest.mark.parametrize("solver", LOW_PRECISION)
def test_a_seed_that_is_no_int_is_refused(solver):
    with pytest.raises(TypeError) as error:
        low_precision(solver, seed=1.5)
    says(error, "seed must be an int", "1.5")


# The wrong solver for the model.


@pytest.mark.parametrize("solver", PLAIN)
def test_bit_centered_parameters_in_a_plain_solver_are_refused(solver):
    with pytest.raises(TypeError) as error:
        make(solver, halp.bit_center(linear()))
    says(error, solver, "is bit-centered", "BitCenterSVRG", "halp.to_plain(model)")


@pytest.mark.parametrize("solver", PLAIN)
def test_a_model_that_was_bit_centered_later_is_refused_by_a_plain_solver(solver):
    run = Run(solver, linear(), regression()).steps(2)
    halp.bit_center(run.model)
    with pytest.raises(TypeError) as error:
        run.steps(1)
    says(error, solver, "is bit-centered", "halp.to_plain(model)")


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_plain_parameters_in_a_bit_centering_solver_are_refused(solver):
    """By the first snapshot: the solver may be made before the model is bit-centered."""
    model = linear()
    optimizer = getattr(halp.optim, solver)(model.parameters(), lr=0.1, T=7)
    with pytest.raises(TypeError) as error:
        optimizer.snapshot(regression(), lambda x, y: None)
    says(error, solver, "plain", "halp.bit_center(model)")


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_a_model_made_plain_in_between_is_refused_by_a_bit_centering_solver(solver):
    run = Run(solver, linear(), regression()).steps(2)
    halp.to_plain(run.model)
    with pytest.raises(TypeError) as error:
        run.step()
    says(error, solver, "plain", "halp.bit_center(model)")


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_a_materialized_model_cannot_be_stepped(solver):
    run = Run(solver, linear(), regression()).steps(2)
    with halp.materialize(run.model), pytest.raises(TypeError) as error:
        run.step()
    says(error, solver, "plain", "halp.bit_center(model)")
    run.steps(2)


# Calls in the wrong order.


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_a_step_before_the_first_snapshot_is_refused(solver):
    run = Run(solver, linear(), regression())
    before = run.values
    with pytest.raises(RuntimeError) as error:
        run.step()
    says(error, f"{solver}.step()", "snapshot first", "optimizer.snapshot(loader, closure)")
    assert all(map(torch.equal, run.values, before))


@pytest.mark.parametrize("solver", ["SVRG", "LPSVRG"])
def test_a_step_of_svrg_without_a_closure_is_refused(solver):
    run = Run(solver, linear(), regression()).steps(2)
    with pytest.raises(TypeError) as error:
        run.optimizer.step()
    says(error, f"{solver}.step()", "closure")


# State dicts of others.


@pytest.mark.parametrize("other", SOLVERS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_state_of_another_solver_is_refused(solver, other):
    if other == solver:
        return
    state = make(other).state_dict()
    optimizer = make(solver)
    with pytest.raises(ValueError) as error:
        optimizer.load_state_dict(state)
    says(error, other, solver)


@pytest.mark.parametrize("other", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_state_of_an_optimizer_of_pytorch_is_refused(solver, other):
    """It lacks g̃, or momentum: only a later step would fail, or go wrong."""
    if other is torch.optim.SGD and solver not in WITH_SNAPSHOTS:
        return  # the same state
    state = other(linear().parameters(), lr=0.1).state_dict()
    run = Run(solver, linear(), regression()).steps(3)
    with pytest.raises(ValueError) as error:
        run.optimizer.load_state_dict(state)
    says(error, "state dict", solver)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_state_of_another_model_is_refused(solver):
    state = make(solver, nn.Linear(5, 1, bias=False)).state_dict()
    with pytest.raises(ValueError, match="parameter group"):
        make(solver).load_state_dict(state)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_state_of_parameters_of_other_shapes_is_refused(solver):
    """A shape of (1, 1) would broadcast."""
    small = regression(features=1)
    state = Run(solver, linear(features=1), small, momentum=0.9).steps(3).optimizer.state_dict()
    run = Run(solver, linear(), regression(), momentum=0.9).steps(3)
    before = run.values
    with pytest.raises(ValueError) as error:
        run.optimizer.load_state_dict(state)
    says(error, "shape", "(1, 1)", "(1, 5)")
    assert all(map(torch.equal, run.values, before))


@pytest.mark.parametrize("solver", BIT_CENTERED)
def test_a_refused_state_changes_nothing(solver):
    run, other = (Run(solver, linear(), regression(), momentum=0.9).steps(3) for _ in range(2))
    with pytest.raises(ValueError):
        run.optimizer.load_state_dict(make("SVRG").state_dict())
    assert all(map(torch.equal, run.steps(10).values, other.steps(10).values))


# What a bit-centered model refuses.


@pytest.fixture
def trained() -> Run:
    return Run("BitCenterSVRG", linear(), regression(), precision={"format": "fp16"}).steps(3)


def test_an_operation_without_a_rule_is_named_with_the_way_out(trained):
    with pytest.raises(NotImplementedError) as error:
        torch.special.bessel_j0(trained.model.weight)
    says(error, "aten.special_bessel_j0.default", "halp.bitcenter.register_rule")


def test_an_operation_without_a_rule_is_named_inside_a_model_too():
    class Bessel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return torch.special.i0(self.inner(x))

    run = Run("BitCenterSVRG", Bessel(), regression(), precision={})
    with pytest.raises(NotImplementedError) as error:
        run.steps(1)
    says(error, "i0", "halp.bitcenter.register_rule")


@pytest.mark.parametrize("foreach", [True, False, None])
def test_clip_grad_norm_is_refused_and_max_norm_named(trained, foreach):
    before = [p.grad.delta.clone() for p in trained.model.parameters()]
    with pytest.raises((NotImplementedError, RuntimeError)) as error:
        nn.utils.clip_grad_norm_(trained.model.parameters(), 1.0, foreach=foreach)
    says(error, "clip_grad_norm_", "max_norm=", "BitCenterSVRG")
    assert all(torch.equal(p.grad.delta, b) for p, b in zip(trained.model.parameters(), before,
                                                            strict=True))  # fmt: skip


def test_assigning_data_is_refused_and_copy_named(trained):
    before = trained.values
    with pytest.raises(RuntimeError) as error:
        trained.model.weight.data = torch.zeros(1, 5)
    says(error, "p.data = t", "p.data.copy_(t)")
    assert all(map(torch.equal, trained.values, before))


@pytest.mark.parametrize("method", ["half", "bfloat16"])
def test_half_is_refused_and_to_plain_named(trained, method):
    before = trained.values
    with pytest.raises(RuntimeError) as error:
        getattr(trained.model, method)()
    says(error, f".{method}()", "halp.to_plain(model)")
    assert all(map(torch.equal, trained.values, before))


def test_a_loss_of_a_materialized_model_is_refused(trained):
    """Its gradients are plain: they have no delta."""
    for p in trained.model.parameters():
        p.grad = None
    with halp.materialize(trained.model):
        trained.loss(trained.model, *trained.batches[0]).backward()
        gradients = [p.grad for p in trained.model.parameters()]
    for p, gradient in zip(trained.model.parameters(), gradients, strict=True):
        p.grad = gradient
    with pytest.raises(RuntimeError) as error:
        trained.optimizer.step()
    says(error, "BitCenterSVRG", "plain tensor", "halp.materialize")


def test_bit_centering_twice_is_refused(trained):
    with pytest.raises(ValueError) as error:
        halp.bit_center(trained.model)
    says(error, "bit-centered already", "halp.to_plain(model)")


@pytest.mark.parametrize("solver", PLAIN)
def test_sparse_gradients_are_refused(solver):
    model = nn.Sequential(nn.Embedding(4, 5, sparse=True), linear(torch.float32))
    batches = [(torch.tensor([0, 1, 3]), torch.zeros(3))]
    run = Run(solver, model, batches)
    with pytest.raises(RuntimeError) as error:
        run.steps(1)
    says(error, "sparse")


@pytest.mark.parametrize("option", ["momentun", "format"])
@pytest.mark.parametrize("solver", ["SGD", "SVRG", "BitCenterSGD", "BitCenterSVRG"])
def test_an_unknown_option_is_refused(solver, option):
    period = {} if solver == "SGD" else {"T": 3}
    with pytest.raises(TypeError, match=option):
        getattr(halp.optim, solver)(linear().parameters(), 0.1, **period, **{option: 0.5})


def test_a_snapshot_closure_without_backward_is_told():
    model = linear()
    optimizer = halp.optim.SVRG(model.parameters(), 0.1, T=3)
    with pytest.raises(ValueError, match=r"loss\.backward\(\)"):
        optimizer.snapshot(regression(), lambda x, y: (model(x).squeeze(1) - y).square().mean())


def test_an_empty_batch_counts_nothing_in_a_snapshot():
    model, (batch, *_) = linear(), regression()
    optimizer = halp.optim.SVRG(model.parameters(), 0.1, T=3)

    def closure(x, y):
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        return loss

    alone = optimizer.snapshot([batch], closure)
    assert optimizer.snapshot([batch, tuple(t[:0] for t in batch)], closure) == alone


# Closures.


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_a_closure_that_computes_no_gradient_is_refused_and_moves_nothing(solver):
    model = linear()
    optimizer = make(solver, model)
    (x, y), *_ = regression()

    def forgetful(*_) -> torch.Tensor:
        optimizer.zero_grad()
        return mean_squares(model, x, y)

    def loss_of(*_) -> torch.Tensor:
        loss = forgetful()
        loss.backward()
        return loss

    if solver != "BitCenterSGD":  # which does not look at the data
        with pytest.raises(ValueError) as error:
            optimizer.snapshot([(x, y)], forgetful)
        says(error, "snapshot()", "left no gradient", "loss.backward()")
    optimizer.snapshot([(x, y)], loss_of)
    before = [halp.value(p) for p in model.parameters()]
    with pytest.raises(ValueError) as error:
        optimizer.step(forgetful)
    says(error, "step()", "left no gradient", "loss.backward()")
    assert all(map(torch.equal, before, map(halp.value, model.parameters())))
    optimizer.step(loss_of)


def test_an_operation_without_a_rule_is_refused_by_name_in_a_snapshot_already():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(5, 3), nn.LSTM(3, 4)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.embedding(words), [3, 2])
            return self.lstm(packed)[0].data.square().mean()

    model = halp.bit_center(Packed())
    optimizer = make("BitCenterSVRG", model)

    def loss_of(words: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(words)
        loss.backward()
        return loss

    with pytest.raises(NotImplementedError) as error:
        optimizer.snapshot([torch.zeros(3, 2, dtype=torch.int64)], loss_of)
    says(error, "aten._pack_padded_sequence.default has no delta rule", "register_rule")
