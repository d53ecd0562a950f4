"""Watching for trouble: what stops a training, what is named, and what is counted."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halp
from halp.training import Diverged, Watch

SOLVERS = ["SGD", "LPSGD", "SVRG", "LPSVRG", "BitCenterSGD", "BitCenterSVRG"]
T = 3


class Exploding(nn.Module):
    """Its middle layer overflows where the input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bend, self.last = nn.Linear(8, 6), Exponential(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.bend(self.first(x)))


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x).exp()


class RootOfZero(nn.Module):
    """Finite forward; its slope is infinite, and times zero it is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) * 0).sqrt())


class Training:
    """A model in training, watched or not."""

    def __init__(
        self,
        solver: str,
        model: nn.Module | None = None,
        *,
        watched: str | None = "stop",
        offsets: str = "on-site",
        rounding: str = "near",
        lr: float = 0.1,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
        if solver.startswith("BitCenter"):
            precision = {k: options.pop(k) for k in ("format", "scale") if k in options}
            halp.bit_center(self.model, rounding=rounding, offsets=offsets, **precision)
        elif solver.startswith("LP"):
            options["rounding"] = rounding
        if solver not in ("SGD", "LPSGD"):
            options["T"] = T
        self.optimizer = getattr(halp.optim, solver)(
            self.model.parameters(), lr=lr, momentum=0.9, **options
        )
        self.told: list[str] = []
        self.watch = None
        if watched:
            self.watch = Watch(
                self.model, self.optimizer, on_overflow=watched, report=self.told.append
            )
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator))
            for _ in range(4)
        ]
        self.spoil: Callable[[Tensor], Tensor] = lambda loss: loss

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.spoil(F.cross_entropy(self.model(x), y))
        loss.backward()
        return loss

    def step(self, number: int) -> Any:
        if self.optimizer.snapshot_due:
            self.optimizer.snapshot(self.batches, self.loss_of)
        x, y = self.batches[number % 4]
        return self.optimizer.step(lambda: self.loss_of(x, y))

    @property
    def weights(self) -> Tensor:
        return torch.cat([halp.value(p).flatten() for p in self.model.parameters()])


@pytest.mark.parametrize("solver", SOLVERS)
def test_nan_in_the_loss_stops_before_the_update(solver):
    training = Training(solver)
    training.step(0)
    training.spoil = lambda loss: loss * math.nan
    before = training.weights
    with pytest.raises(Diverged, match=r"step 2: the loss holds NaN in 1 of 1 elements; try a low"):
        training.step(1)
    assert torch.equal(training.weights, before)


@pytest.mark.parametrize("offsets", ["on-site", "cached"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_first_tensor_that_overflows_is_named(solver, offsets):
    """Nothing is large in the snapshot's batches; a parameter is made large afterwards."""
    model = Exploding()
    training = Training(solver, model, offsets=offsets, lr=1e-3)
    training.step(0)
    before = training.weights
    with torch.no_grad():
        if solver.startswith("BitCenter"):
            model.first.bias.delta.fill_(60)
        else:
            model.first.bias.fill_(60)
    with pytest.raises(Diverged) as error:
        training.step(1)
    if solver in ("SGD", "SVRG"):
        assert "step 2: the output of bend (Exponential) holds inf in 96 of 96" in str(error.value)
    else:  # rounding saturates
        assert "was rounded for the output of bend (Exponential)" in str(error.value)
    assert torch.equal(training.weights[54:], before[54:])  # all that is not that parameter


def test_the_first_gradient_that_overflows_is_named():
    training = Training("SGD", RootOfZero())
    with pytest.raises(Diverged, match=r"the gradient of first\.(bias|weight) holds NaN"):
        training.step(0)


@pytest.mark.parametrize("solver", ["SGD", "SVRG", "BitCenterSGD", "BitCenterSVRG"])
def test_a_learning_rate_that_is_too_large_is_found_out(solver):
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    training = Training(solver, model, lr=1e4)
    training.spoil = lambda loss: loss.square()
    with pytest.raises(Diverged, match="try a lower learning rate than 10000"):
        for number in range(200):
            training.step(number)


def test_without_a_closure_parameters_are_named():
    training = Training("SGD")
    training.loss_of(*training.batches[0])
    training.model[0].weight.grad[2, 3] = math.inf
    with pytest.raises(Diverged, match=r"the gradient of 0\.weight holds inf in 1 of 48"):
        training.optimizer.step()


def test_trouble_in_a_snapshot_stops_too():
    training = Training("BitCenterSVRG")
    training.spoil = lambda loss: loss * math.inf
    with pytest.raises(Diverged, match="snapshot"):
        training.step(0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_warning_comes_once_and_training_goes_on(solver):
    training = Training(solver, watched="warn")
    training.step(0)
    training.spoil = lambda loss: loss * math.nan
    for number in (1, 2):
        training.step(number)
    assert len([line for line in training.told if "the loss holds NaN" in line]) == 1


@pytest.mark.parametrize("offsets", ["on-site", "cached"])
@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_watching_changes_no_number(solver, rounding, offsets):
    watched, alone = (
        Training(solver, rounding=rounding, watched=how, offsets=offsets) for how in ("stop", None)
    )
    for number in range(8):
        assert torch.equal(watched.step(number), alone.step(number))
    assert torch.equal(watched.weights, alone.weights)
    assert watched.told == []


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("solver", ["LPSGD", "BitCenterSVRG"])
def test_looking_for_the_first_tensor_draws_nothing_from_the_run(solver, rounding):
    """With warnings the run goes on as if nobody had looked."""
    results = []
    for how in ("warn", None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.Dropout(), nn.Linear(6, 3))
        training = Training(solver, model, watched=how, rounding=rounding)
        torch.manual_seed(5)
        losses = []
        for number in range(8):
            training.spoil = lambda loss, n=number: loss + math.inf if n == 4 else loss
            losses.append(training.step(number))
        results.append(([float(loss) for loss in losses], training.weights))
        assert bool(training.told) == (how == "warn")
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


# Counts.


def test_underflow_is_counted_as_numpys_float16_rounds():
    model = nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-12, -3, 64).exp2().view(1, 64) * 2.0**-12)
    optimizer = halp.optim.LPSGD(model.parameters(), lr=1.0, format="fp16")
    watch = Watch(model, optimizer)
    optimizer._put_on_grid()
    gradient = torch.zeros(1, 64)
    gradient[0, ::2] = 2.0**-24  # on the grid; takes small weights below half a step
    wide = model.weight.detach().numpy() - gradient.numpy()
    model.weight.grad = gradient
    optimizer.step()
    expected = int(((wide != 0) & (wide.astype(np.float16) == 0)).sum())
    counts = watch.counts["weight", "weights"]
    assert (counts.rounded, counts.saturated) == (64, 0)
    assert counts.underflowed == expected


def test_saturation_is_counted_and_advice_given():
    model = halp.bit_center(nn.Linear(4, 1, bias=False), "fixed8", scale=2.0**-10)
    optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=1.0, T=9)
    watch = Watch(model, optimizer)
    x = torch.tensor([[1.0, 0.01, 1.0, 0.0]])
    closure = lambda x: backward((model(x) * 1.0).sum())  # noqa: E731
    optimizer.snapshot([x], closure)
    # The gradient is x: on a grid that ends at 127/1024, two of its entries saturate; none is lost.
    counts = watch.counts["weight", "full gradient"]
    assert (counts.rounded, counts.saturated, counts.underflowed) == (4, 2, 0)
    (line,) = watch.summary()
    assert line.startswith("full gradient of weight: 50.0% (2) of the entries")


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def test_counts_and_what_was_said_are_in_the_state():
    training = Training("BitCenterSVRG")
    for number in range(4):
        training.step(number)
    other = Training("BitCenterSVRG")
    other.watch.load_state_dict(training.watch.state_dict())
    assert other.watch.counts == training.watch.counts
    assert other.watch.steps == 4


# Deltas.


def test_a_delta_larger_than_its_offset_is_reported_once():
    training = Training("BitCenterSVRG")
    training.step(0)
    weight = training.model[0].weight
    weight.delta.fill_(2 * float(weight.offset.norm()) / math.sqrt(weight.numel()))
    for number in range(1, 2 * T + 1):
        training.step(number)
    (line,) = training.told
    assert line.startswith("step 3: the delta of 0.weight has norm")
    assert "smaller T or a lower learning rate" in line


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_healthy_run_gives_no_alarm(solver):
    training = Training(solver)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(150):
            training.step(number)
    assert training.told == []


def test_a_closed_watch_sees_nothing():
    training = Training("LPSGD")
    with training.watch:
        training.step(0)
    assert training.optimizer.watch is None
    training.spoil = lambda loss: loss * math.nan
    training.step(1)
    assert training.watch.steps == 1


def test_wrong_arguments_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match='on_overflow must be "stop" or "warn", not \'halt\''):
        Watch(model, halp.optim.SGD(model.parameters(), lr=0.1), on_overflow="halt")
