"""Delta rules of arithmetic: a function in PyTorch, the same in decimals, and where to try it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bitcenter import decimals


class Domain(NamedTuple):
    """Where an operand's offset and delta are drawn."""

    shape: tuple[int, ...]
    #: u = exp(N(0, 1)) and |e| < 0.9·u; or u evenly spread over ±9, on no kink; else u normal.
    positive: bool = False
    spread: bool = False

    def draw(self, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return an offset, and a delta of about ``scale``."""
        u, e = torch.randn(self.shape), torch.randn(self.shape)
        if self.positive:
            u = u.exp()
            return u.to(dtype), (u * min(scale, 1) * (1.8 * torch.rand(self.shape) - 0.9)).to(dtype)
        if self.spread:
            u = torch.linspace(-9.1, 8.9, u.numel()).view(self.shape)
        return u.to(dtype), (scale * e.to(dtype)).to(dtype)


ANY, POSITIVE = Domain((37,), spread=True), Domain((37,), positive=True)


class Rule(NamedTuple):
    """A function in PyTorch and in decimals."""

    name: str
    run: Callable[..., Tensor]
    truth: Callable[..., np.ndarray]
    domains: tuple[Domain, ...]
    #: Whether every element has to be right by itself, or relative to the largest one.
    elementwise: bool = True
    #: Whether the slope has zeros, next to which only an error relative to e can be small.
    flat_somewhere: bool = False
    #: Whether the backward pass has rules, too.
    differentiable: bool = True

    def __str__(self) -> str:
        return self.name


def normal(*shape: int) -> Domain:
    return Domain(shape)


def unary(name: str, run: Callable, truth: Callable, domain: Domain = ANY, **kind: bool) -> Rule:
    return Rule(name, run, truth, (domain,), **kind)


POINTWISE = [
    unary("neg", torch.neg, lambda x: -x),
    unary("square", torch.square, lambda x: x * x, flat_somewhere=True),
    unary("pow 2", lambda x: x**2, lambda x: x * x, flat_somewhere=True),
    unary("pow 3", lambda x: x**3, lambda x: x**3, flat_somewhere=True),
    unary("pow 0.5", lambda x: x**0.5, decimals.sqrt, POSITIVE),
    unary("pow 1.5", lambda x: x**1.5, lambda x: x * decimals.sqrt(x), POSITIVE),
    unary("pow -1", lambda x: x**-1, lambda x: 1 / x, POSITIVE),
    unary("pow -2", lambda x: x**-2, lambda x: 1 / (x * x), POSITIVE),
    unary("reciprocal", torch.reciprocal, lambda x: 1 / x, POSITIVE),
    unary("number / x", lambda x: 3 / x, lambda x: 3 / x, POSITIVE),
    unary("sqrt", torch.sqrt, decimals.sqrt, POSITIVE),
    unary("rsqrt", torch.rsqrt, lambda x: 1 / decimals.sqrt(x), POSITIVE),
    unary("exp", torch.exp, decimals.exp),
    unary("expm1", torch.expm1, decimals.exp),
    unary("log", torch.log, decimals.log, POSITIVE),
    unary("log1p", torch.log1p, lambda x: decimals.log(1 + x), POSITIVE),
    unary("sin", torch.sin, decimals.sin, flat_somewhere=True),
    unary("cos", torch.cos, decimals.cos, flat_somewhere=True),
    unary("erf", torch.erf, decimals.erf, flat_somewhere=True),
    unary("sigmoid", torch.sigmoid, decimals.sigmoid),
    unary("tanh", torch.tanh, decimals.tanh),
    unary("gelu", F.gelu, decimals.gelu, flat_somewhere=True),
    unary(
        "tanh-gelu",
        lambda x: F.gelu(x, approximate="tanh"),
        decimals.tanh_gelu,
        flat_somewhere=True,
    ),
    unary("silu", F.silu, lambda x: x * decimals.sigmoid(x), flat_somewhere=True),
    unary("softplus", F.softplus, decimals.softplus),
    unary(
        "softplus, beta",
        lambda x: F.softplus(x, beta=8, threshold=50),
        lambda x: decimals.softplus(x, 8, 50),
    ),
    unary(
        "softplus, threshold",
        lambda x: F.softplus(x, threshold=2.2),
        lambda x: decimals.softplus(x, threshold=2.2),
    ),
    unary("relu", F.relu, decimals.relu, flat_somewhere=True),
    unary("abs", torch.abs, lambda x: abs(x), flat_somewhere=True),
    unary(
        "leaky relu",
        lambda x: F.leaky_relu(x, 0.25),
        lambda x: np.where(x > 0, x, x / 4),
        flat_somewhere=True,
    ),
    unary("hardtanh", F.hardtanh, lambda x: np.clip(x, -1, 1), flat_somewhere=True),
    unary("relu6", F.relu6, lambda x: np.clip(x, 0, 6), flat_somewhere=True),
    unary("clamp_min", lambda x: x.clamp_min(-2), lambda x: np.maximum(x, -2), flat_somewhere=True),
    unary("clamp_max", lambda x: x.clamp_max(3), lambda x: np.minimum(x, 3), flat_somewhere=True),
    unary("clamp, min", lambda x: x.clamp(min=1), lambda x: np.maximum(x, 1), flat_somewhere=True),
    unary("clamp", lambda x: x.clamp(-2, 3), lambda x: np.clip(x, -2, 3), flat_somewhere=True),
    unary("x + number", lambda x: x + 2, lambda x: x + 2),
    unary("number - x", lambda x: 2 - x, lambda x: 2 - x),
    unary("number · x", lambda x: 2.5 * x, lambda x: 5 * x / 2),
    unary("x / number", lambda x: x / 3, lambda x: x / 3),
    unary("aten.sub.Scalar", lambda x: torch.ops.aten.sub.Scalar(x, 2), lambda x: x - 2),
    unary("rsub, alpha", lambda x: torch.rsub(x, 2, alpha=3), lambda x: 2 - 3 * x),
    unary("add, alpha", lambda x: torch.add(x, 2, alpha=3), lambda x: x + 6),
]

_SHAPES = [((5, 4), (5, 4)), ((5, 4), (4,)), ((4,), (5, 4)), ((5, 1), (1, 4)), ((), (5, 4))]
_OPERATIONS = {
    "add": (torch.add, lambda x, y: x + y),
    "add, alpha": (lambda x, y: torch.add(x, y, alpha=3), lambda x, y: x + 3 * y),
    "sub": (torch.sub, lambda x, y: x - y),
    "sub, alpha": (lambda x, y: torch.sub(x, y, alpha=3), lambda x, y: x - 3 * y),
    "rsub": (lambda x, y: torch.rsub(x, y, alpha=3), lambda x, y: y - 3 * x),
    "mul": (torch.mul, lambda x, y: x * y),
    "div": (torch.div, lambda x, y: x / y),
    "maximum": (torch.maximum, np.maximum),
    "minimum": (torch.minimum, np.minimum),
    "squared error": (
        lambda x, y: F.mse_loss(*torch.broadcast_tensors(x, y), reduction="none"),
        lambda x, y: (x - y) ** 2,
    ),
}
BROADCAST = [
    Rule(f"{name} {a} {b}", run, truth, (Domain(a, positive=True), Domain(b, positive=True)), False)
    for name, (run, truth) in _OPERATIONS.items()
    for a, b in _SHAPES
]

PRODUCTS = [
    Rule("mm", torch.mm, lambda x, y: x @ y, (normal(5, 7), normal(7, 3)), False),
    Rule("bmm", torch.bmm, lambda x, y: x @ y, (normal(2, 5, 7), normal(2, 7, 3)), False),
    Rule("mv", torch.mv, lambda x, y: x @ y, (normal(5, 7), normal(7)), False),
    Rule("dot", torch.dot, lambda x, y: x @ y, (normal(7), normal(7)), False),
    Rule("matmul", torch.matmul, lambda x, y: x @ y, (normal(2, 5, 7), normal(7, 3)), False),
    Rule("outer", torch.outer, np.multiply.outer, (normal(5), normal(7)), False),
    Rule(
        "linear",
        F.linear,
        lambda x, w, b: x @ w.T + b,
        (normal(2, 5, 7), normal(3, 7), normal(3)),
        False,
    ),
]
PRODUCTS += [
    Rule(
        name,
        lambda b, x, y, op=op: op(b, x, y, beta=0.5, alpha=3),
        lambda b, x, y: b / 2 + 3 * (x @ y),
        shapes,
        False,
    )
    for name, op, shapes in (
        ("addmm", torch.addmm, (normal(3), normal(5, 7), normal(7, 3))),
        ("baddbmm", torch.baddbmm, (normal(2, 5, 3), normal(2, 5, 7), normal(2, 7, 3))),
        ("addmv", torch.addmv, (normal(5), normal(5, 7), normal(7))),
    )
]
