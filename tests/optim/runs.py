"""What the optimizer tests share: one loop that drives all six solvers, and its reference."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

import halp

PLAIN = ("SGD", "LPSGD", "SVRG", "LPSVRG")
BIT_CENTERED = ("BitCenterSGD", "BitCenterSVRG")
SOLVERS = PLAIN + BIT_CENTERED
LOW_PRECISION = ("LPSGD", "LPSVRG", *BIT_CENTERED)
WITH_SNAPSHOTS = ("SVRG", "LPSVRG", *BIT_CENTERED)
VARIANCE_REDUCED = ("SVRG", "LPSVRG", "BitCenterSVRG")

#: Each solver with the roundings that make a difference to it.
SOLVERS_AND_ROUNDINGS = [
    (solver, rounding)
    for solver in SOLVERS
    for rounding in (("near", "stoc") if solver in LOW_PRECISION else ("near",))
]


def mean_squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """``‖model(x) − y‖² / 2n``."""
    return 0.5 * (model(x).squeeze(-1) - y).square().mean()


class Run:
    """A model, its solver and its batches, in the loop of the README.

    ``precision`` goes to the low-precision solvers, wherever they take it: ``format``,
    ``rounding``, ``scale``, ``seed`` and, for bit-centered models, ``offset_dtype``.
    """

    def __init__(
        self,
        solver: str,
        model: nn.Module,
        batches: Sequence,
        *,
        lr: float = 0.1,
        T: int = 7,
        loss: Callable[..., Tensor] = mean_squares,
        groups: Callable[[nn.Module], list[dict]] | None = None,
        precision: dict | None = None,
        **options,
    ) -> None:
        precision = {"rounding": "void"} if precision is None else dict(precision)
        self.model, self.batches, self.loss = model, batches, loss
        if solver in BIT_CENTERED:
            halp.bit_center(model, **precision)
        elif solver in LOW_PRECISION:
            precision.pop("offset_dtype", None)
            options.update(precision)
        if solver in WITH_SNAPSHOTS:
            options["T"] = T
        params = groups(model) if groups else model.parameters()
        self.optimizer = getattr(halp.optim, solver)(params, lr, **options)
        self.count = 0

    def closure(self, *batch: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, *batch)
        loss.backward()
        return loss

    def snapshot(self, loader=None):
        return self.optimizer.snapshot(self.batches if loader is None else loader, self.closure)

    def step(self):
        batch = self.batches[self.count % len(self.batches)]
        self.count += 1
        return self.optimizer.step(lambda: self.closure(*batch))

    def steps(self, count: int, after_each: Callable[[], None] | None = None) -> "Run":
        for _ in range(count):
            if self.optimizer.snapshot_due:
                self.snapshot()
            self.step()
            if after_each:
                after_each()
        return self

    @property
    def values(self) -> list[Tensor]:
        return [halp.value(p) for p in self.model.parameters()]


def reference(
    model: nn.Module,
    batches: Sequence,
    steps: int,
    *,
    T: int | None,
    lr: float | Callable = 0.1,
    momentum: float | Callable = 0.0,
    weight_decay: float | Callable = 0.0,
    nesterov: bool = False,
    loss: Callable[..., Tensor] = mean_squares,
) -> list[Tensor]:
    """Parameters after ``steps`` steps of SGD (T None) or SVRG, by the recurrences, in float64.

    Gradients are autograd's, through a functional call; the rest is written out. ``lr``,
    ``momentum`` and ``weight_decay`` may be functions of (step, parameter name).
    """
    model = copy.deepcopy(model).double()
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    frozen = {
        name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
    }
    batches = [[t.double() if t.is_floating_point() else t for t in b] for b in batches]

    def gradients(at: dict[str, Tensor], batch) -> dict[str, Tensor | None]:
        leaves = {name: w.clone().requires_grad_() for name, w in at.items()}

        def call(*inputs):
            return functional_call(model, {**leaves, **frozen}, inputs)

        found = torch.autograd.grad(loss(call, *batch), list(leaves.values()), allow_unused=True)
        return dict(zip(leaves, found, strict=True))

    def setting(value, step, name):
        return value(step, name) if callable(value) else value

    buffers: dict[str, Tensor] = {}
    center, full = weights, {}
    for step in range(steps):
        batch = batches[step % len(batches)]
        if T is not None and step % T == 0:
            center = {name: w.clone() for name, w in weights.items()}
            total = sum(len(b[0]) for b in batches)
            parts = [(len(b[0]) / total, gradients(center, b)) for b in batches]
            full = {
                name: sum(share * g[name] for share, g in parts if g[name] is not None)
                if any(g[name] is not None for _, g in parts)
                else None
                for name in weights
            }
        here = gradients(weights, batch)
        there = gradients(center, batch) if T is not None else {}
        for name, w in weights.items():
            v = here[name]
            if T is not None:
                if full[name] is None:
                    continue
                v = full[name] if v is None else v - there[name] + full[name]
            if v is None:
                continue
            v = v + setting(weight_decay, step, name) * w
            m = setting(momentum, step, name)
            if m:
                buffers[name] = m * buffers[name] + v if name in buffers else v
                v = v + m * buffers[name] if nesterov else buffers[name]
            weights[name] = w - setting(lr, step, name) * v
    return [{**weights, **frozen}[name] for name, _ in model.named_parameters()]


def reference_period(solver: str, T: int = 7) -> int | None:
    """What :func:`reference` takes as T for this solver."""
    return T if solver in VARIANCE_REDUCED else None


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], relative: float = 1e-12):
    """Compare lists of tensors by norm, and say which one differs most."""
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)
        assert error <= relative, f"tensor {index}: relative error {error:.2e} > {relative:.0e}"


def assert_identical(found: Sequence[Tensor], expected: Sequence[Tensor]):
    """Compare lists of tensors bit for bit."""
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype, f"tensor {index}: {a.dtype} is not {b.dtype}"
        difference = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        assert torch.equal(a, b), f"tensor {index}: differs by up to {difference:.2e}"


def regression(dtype=torch.float64, *, sizes=(8, 8, 3), features=5, seed=1) -> list:
    """Batches of a small least-squares problem, the last one short."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), features, generator=random, dtype=torch.float64).to(dtype)
    y = torch.randn(sum(sizes), generator=random, dtype=torch.float64).to(dtype)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def linear(dtype=torch.float64, *, features=5, bias=True, seed=1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(features, 1, bias=bias).to(dtype)


def mlp(dtype=torch.float64, *, features=5, hidden=6, seed=1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, 1)).to(dtype)
