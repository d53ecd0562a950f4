"""The problems and the long runs of test_convergence."""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halp
from halp.data import load_digits

LAMBDA = 0.01


@lru_cache
def least_squares(seed: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return A of shape (500, 20), with singular values √(n·ev), and y = Aw + noise."""
    random = numpy.random.default_rng(seed)
    n, d = 500, 20
    eigenvalues = numpy.logspace(0, -1, d)
    q, _ = numpy.linalg.qr(random.standard_normal((n, d)))
    v, _ = numpy.linalg.qr(random.standard_normal((d, d)))
    a = q @ numpy.diag(numpy.sqrt(n * eigenvalues)) @ v.T
    w = random.standard_normal(d)
    return a, a @ w + random.standard_normal(n)


@dataclass(frozen=True)
class LeastSquares:
    """Design section 6, row 5: ``f = ‖Aw − y‖²/2n`` with n = 500 and d = 20."""

    seed: int
    #: Cycles of T steps, and a in units of 1/max‖a_i‖².
    cycles: int = 40
    step_size: float = 0.5
    #: Names the sequence of samples.
    order: int = 1000

    batch_size = 1
    T = 500
    weight_decay = 0.0

    @property
    def data(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        return least_squares(self.seed)

    @property
    def lr(self) -> float:
        return self.step_size / (self.data[0] ** 2).sum(1).max()

    def gradient(self, parameters: list[numpy.ndarray]) -> numpy.ndarray:
        a, y = self.data
        return a.T @ (a @ parameters[0].ravel() - y) / len(a)

    def model(self) -> nn.Module:
        return nn.Linear(20, 1, bias=False)

    @staticmethod
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (output.squeeze(1) - y).square().mean()


@lru_cache
def digits() -> tuple[numpy.ndarray, numpy.ndarray]:
    data = load_digits()
    return data.train_inputs.double().numpy(), data.train_labels.numpy()


def softmax_gradient(w: numpy.ndarray, b: numpy.ndarray) -> numpy.ndarray:
    """Gradient of the regularized softmax regression on digits, weights first, by NumPy."""
    x, labels = digits()
    logits = x @ w.T + b
    p = numpy.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[numpy.arange(len(p)), labels] -= 1
    p /= len(x)
    return numpy.concatenate([(p.T @ x + LAMBDA * w).ravel(), p.sum(0) + LAMBDA * b])


@dataclass(frozen=True)
class Digits:
    """Design section 6, row 6: softmax regression on the digits, bias regularized too."""

    seed: int
    cycles: int = 30
    order: int = 1000

    batch_size = 8
    T = 400
    weight_decay = LAMBDA
    lr = 0.4
    loss = staticmethod(cross_entropy)

    @property
    def data(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        return digits()

    def gradient(self, parameters: list[numpy.ndarray]) -> numpy.ndarray:
        return softmax_gradient(*parameters)

    def model(self) -> nn.Module:
        return nn.Linear(64, 10)


@dataclass(frozen=True)
class LongRun:
    """One solver on one problem."""

    problem: LeastSquares | Digits
    solver: str
    #: What goes to ``bit_center``, or to the low-precision solver, as pairs.
    precision: tuple = ()
    momentum: float = field(default=0.0)
    #: Of fixed-point HALP.
    mu: float | None = None


def orders(problem: LeastSquares | Digits) -> numpy.ndarray:
    """Sample indices of shape (cycles, T, batch size), drawn with replacement."""
    random = numpy.random.default_rng(problem.order + problem.seed)
    return random.integers(
        len(problem.data[0]), size=(problem.cycles, problem.T, problem.batch_size)
    )


def gradient_norms(run: LongRun) -> numpy.ndarray:
    """Do a run from w = 0; return ‖∇f‖ after each cycle, by NumPy in float64."""
    problem = run.problem
    x, y = (torch.from_numpy(part) for part in problem.data)
    model, precision = problem.model(), dict(run.precision)
    for p in model.parameters():
        nn.init.zeros_(p)
    options = {"T": problem.T, "momentum": run.momentum, "weight_decay": problem.weight_decay}
    if run.solver == "BitCenterSVRG":
        halp.bit_center(model, offset_dtype=torch.float64, **precision)
        if run.mu is not None:
            options["mu"] = run.mu
    else:
        model.double()
        options.update(precision)
    optimizer = getattr(halp.optim, run.solver)(model.parameters(), problem.lr, **options)

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(model(inputs), targets)
        loss.backward()
        return loss

    # A list of unequal batches: what is averaged must be samples.
    loader = list(zip(x.split(300), y.split(300), strict=True))
    norms = []
    for cycle in orders(problem):
        optimizer.snapshot(loader, closure)
        for indices in torch.from_numpy(cycle):
            batch = x[indices], y[indices]
            optimizer.step(lambda batch=batch: closure(*batch))
        assert optimizer.snapshot_due
        parameters = [halp.value(p).double().numpy() for p in model.parameters()]
        norms.append(float(numpy.linalg.norm(problem.gradient(parameters))))
    return numpy.array(norms)


def reference_norms(problem: LeastSquares, momentum: float = 0.0) -> numpy.ndarray:
    """SVRG on row 5's problem in NumPy, float64: ``a_i·a_iᵀ(w − w̃)`` is ∇f_i(w) − ∇f_i(w̃)."""
    a, y = problem.data
    lr = problem.lr
    w, buffer, norms = numpy.zeros(20), numpy.zeros(20), []
    for cycle in orders(problem)[:, :, 0]:
        full, z = a.T @ (a @ w - y) / len(a), numpy.zeros(20)
        for i in cycle:
            buffer = momentum * buffer + a[i] * (a[i] @ z) + full
            z = z - lr * buffer
        w = w + z
        norms.append(float(numpy.linalg.norm(problem.gradient([w]))))
    return numpy.array(norms)
