"""An oracle for delta rules: f(u + e) − f(u) in decimal arithmetic of 100 digits.

Functions take and return NumPy arrays of :class:`decimal.Decimal`, which have NumPy's arithmetic,
``@`` and ``sum``; what NumPy lacks is here. No digit that float64 could hold is lost in the
difference, however small e is.
"""

from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache

import numpy as np
import torch
from torch import Tensor

DIGITS = 100

_decimals = np.frompyfunc(Decimal, 1, 1)
exp = np.frompyfunc(lambda x: x.exp(), 1, 1)
log = np.frompyfunc(lambda x: x.ln(), 1, 1)
sqrt = np.frompyfunc(lambda x: x.sqrt(), 1, 1)


def exactly(x: Tensor) -> np.ndarray:
    """Return the values of a tensor as decimals, unrounded."""
    return np.asarray(_decimals(x.detach().double().numpy()), dtype=object)


def change(f: Callable, offsets: list[Tensor], deltas: list[Tensor]) -> Tensor:
    """Return f(u + e) − f(u), correct to the last bit of float64 but one."""
    with localcontext(prec=DIGITS):
        u, e = [list(map(exactly, tensors)) for tensors in (offsets, deltas)]
        difference = f(*(a + b for a, b in zip(u, e, strict=True))) - f(*u)
        return torch.from_numpy(np.asarray(difference, dtype=object).astype(np.float64))


def number(x: float) -> Decimal:
    """Return a float exactly."""
    return Decimal(x)


@cache
def pi(digits: int = DIGITS) -> Decimal:
    """Machin's formula: π/4 = 4·arctan(1/5) − arctan(1/239)."""
    with localcontext(prec=digits + 10):

        def arctan_of_inverse(n: int) -> Decimal:
            return sum(
                Decimal((-1) ** k) / ((2 * k + 1) * Decimal(n) ** (2 * k + 1))
                for k in range(digits)
            )

        return 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))


def _series(first: Decimal, ratio: Callable[[int], Decimal]) -> Decimal:
    """Sum the series whose k-th term is ``ratio(k)`` times the one before it."""
    total, term, k = Decimal(0), first, 0
    while term != 0 and abs(term) > Decimal(10) ** (1 - DIGITS) * abs(first):
        total += term
        k += 1
        term *= ratio(k)
    return total


def _erf(x: Decimal) -> Decimal:
    """2/√π · e^(−x²) · Σ 2ᵏ x^(2k+1) / (1·3·…·(2k+1)): no cancellation."""
    sum_ = _series(x, lambda k: 2 * x * x / (2 * k + 1))
    return 2 / pi().sqrt() * (-x * x).exp() * sum_


def _sin(x: Decimal) -> Decimal:
    return _series(x, lambda k: -x * x / (2 * k * (2 * k + 1)))


erf = np.frompyfunc(_erf, 1, 1)
sin = np.frompyfunc(_sin, 1, 1)


def cos(x: np.ndarray) -> np.ndarray:
    return sin(x + pi() / 2)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + exp(-x))


def tanh(x: np.ndarray) -> np.ndarray:
    return 2 * sigmoid(2 * x) - 1


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + erf(x / Decimal(2).sqrt())) / 2


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    inner = (2 / pi()).sqrt() * (x + Decimal("0.044715") * x**3)
    return x * (1 + tanh(inner)) / 2


def softplus(x: np.ndarray, beta: int = 1, threshold: float = 20) -> np.ndarray:
    """PyTorch's: linear from ``beta·x = threshold`` on."""
    return np.where(beta * x > threshold, x, log(1 + exp(beta * x)) / beta)


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    terms = exp(x)
    return terms / terms.sum(axis, keepdims=True)


def log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    return x - log(exp(x).sum(axis, keepdims=True))


def relu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, Decimal(0))
