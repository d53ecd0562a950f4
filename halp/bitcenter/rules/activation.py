"""Activation functions and their backward passes."""

import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from halp.bitcenter.cache import Recipe, Recipes
from halp.bitcenter.dispatch import register_recipe, register_rule
from halp.bitcenter.offsets import EXACT, LOW, SIGNED
from halp.bitcenter.operands import Decided, Operand

aten = torch.ops.aten

# 6-node Gauss–Legendre quadrature on [−1, 1].
_NODES, _WEIGHTS = (values.tolist() for values in numpy.polynomial.legendre.leggauss(6))


def smooth(
    f: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    x: Operand,
    radius: Tensor | float = 0.5,
) -> Tensor:
    """Delta of any smooth pointwise function: ``e·Σᵢ wᵢ f′(u + xᵢ·e)`` for ``|e| < radius``.

    That is ``∫ f′`` from u to u + e (derived: fundamental theorem of calculus, Gauss–Legendre). At
    twice the radius, f must still be smooth. Beyond it little cancels in ``f(u + e) − f(u)``.
    """
    u, e = x.offset, x.delta
    mean_slope = torch.zeros_like(u)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        mean_slope += weight / 2 * derivative(u + (node + 1) / 2 * e)
    return torch.where(e.abs() < radius, e * mean_slope, f(u + e) - f(u))


def times_smooth(
    gradient: Operand,
    f: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    x: Operand,
    radius: Tensor | float = 0.5,
) -> Tensor:
    """``δ(g·f(x)) = e_g·(f(u) + δf) + u_g·δf``: backward of an activation whose slope is f."""
    if x.delta is None:
        return gradient.delta * f(x.offset)
    change = smooth(f, derivative, x, radius)
    if gradient.delta is None:
        return gradient.offset * change
    return gradient.delta * (f(x.offset) + change) + gradient.offset * change


def sigmoid_change(u: Tensor, e: Tensor) -> Tensor:
    """``σ(u + e) − σ(u) = sgn(e)·(−expm1(−|e|))·σ(max(u, u+e))·σ(−min(u, u+e))``.

    Derived from σ(a) − σ(b) = σ(a)·σ(−b)·(1 − exp(b − a)); ``1 − σ`` never appears.
    """
    full = u + e
    larger, smaller = torch.maximum(u, full), torch.minimum(u, full)
    return -torch.sgn(e) * torch.expm1(-e.abs()) * torch.sigmoid(larger) * torch.sigmoid(-smaller)


@register_rule(aten.sigmoid.default)
def sigmoid(x: Operand) -> Tensor:
    """See :func:`sigmoid_change`."""
    return sigmoid_change(x.offset, x.delta)


@register_rule(aten.tanh.default)
def tanh(x: Operand) -> Tensor:
    """``δ(tanh x) = 2·Δσ(2u, 2e)``, since tanh x = 2σ(2x) − 1."""
    return 2 * sigmoid_change(2 * x.offset, 2 * x.delta)


@register_recipe(aten.sigmoid.default)
def sigmoid_of_kept(x: Operand) -> Recipes:
    """Of u: σ of what is kept."""
    return _pointwise(torch.sigmoid, x)


@register_recipe(aten.tanh.default)
def tanh_of_kept(x: Operand) -> Recipes:
    """Of u: tanh of what is kept."""
    return _pointwise(torch.tanh, x)


def _pointwise(f: Callable[[Tensor], Tensor], x: Operand) -> Recipes:
    source = (x.source(LOW),)
    return {
        LOW: Recipe(source, lambda u: x.nearest(f(u))),
        EXACT: Recipe(source, f),
    }


@register_rule(aten.sigmoid_backward.default)
def sigmoid_backward(gradient: Operand, y: Operand) -> Tensor:
    """``δ(g·y(1−y)) = e_g·y(1−y) + u_g·y_d(1 − 2y_o − y_d)``, y = y_o + y_d, y_o unrounded."""
    return _slope_of_result(
        gradient, y, lambda y: y * (1 - y), lambda old, e: e * (1 - 2 * old - e)
    )


@register_rule(aten.tanh_backward.default)
def tanh_backward(gradient: Operand, y: Operand) -> Tensor:
    """``δ(g·(1−y²)) = e_g·(1−y²) − u_g·y_d(2y_o + y_d)``, y = y_o + y_d, y_o unrounded."""
    return _slope_of_result(
        gradient, y, lambda y: (1 - y) * (1 + y), lambda old, e: -e * (2 * old + e)
    )


def _slope_of_result(
    gradient: Operand,
    y: Operand,
    slope: Callable[[Tensor], Tensor],
    slope_change: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    if y.delta is None:
        return gradient.delta * slope(y.exact)
    change = slope_change(y.exact, y.delta)
    if gradient.delta is None:
        return gradient.offset * change
    return gradient.delta * slope(y.exact + y.delta) + gradient.offset * change


@register_rule(aten.relu.default)
def relu(x: Operand) -> Decided:
    """``max(e, −u)`` where u > 0, and ``relu(u + e)`` elsewhere: by the signs e, −u, u + e or 0."""
    u, e = x.signed, x.delta
    full, positive = u + e, u > 0
    delta = kept(torch.maximum(e, -u), positive) + kept(torch.relu(full), ~positive)
    return Decided(delta, ~(full <= 0))


@register_recipe(aten.relu.default)
def relu_of_kept(x: Operand) -> Recipes:
    """The positive part of what is kept of u."""
    return {form: Recipe((x.source(form),), torch.relu) for form in (LOW, SIGNED)}


@register_rule(aten.leaky_relu.default)
def leaky_relu(x: Operand, slope: float = 0.01) -> Tensor:
    """``slope·x + (1 − slope)·relu(x)``."""
    return slope * x.delta + (1 - slope) * relu(x).delta


@register_rule(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    gradient: Operand, x: Operand, slope: float, self_is_result: bool
) -> Tensor:
    """``g·(slope + (1 − slope)·[x > 0])``."""
    u = x.signed
    after = u > 0 if x.delta is None else u + x.delta > 0
    return _times_indicator(gradient, u > 0, after, outside=slope)


@register_rule(aten.hardtanh_backward.default)
def hardtanh_backward(gradient: Operand, x: Operand, low: float, high: float) -> Tensor:
    """``g`` inside the bounds, 0 outside."""
    above = x.keep(("above", low), lambda u: u - low, form=SIGNED)
    below = x.keep(("below", high), lambda u: high - u, form=SIGNED)
    before = (above > 0) & (below > 0)
    if x.delta is None:
        return _times_indicator(gradient, before, before)
    return _times_indicator(gradient, before, (above + x.delta > 0) & (below - x.delta > 0))


@register_rule(aten.threshold_backward.default)
def threshold_backward(gradient: Operand, result: Operand, threshold: float) -> Tensor:
    """``g`` where the activation let values through, decided as its forward pass decided."""
    y = result.signed if threshold == 0 else result.exact
    before, after = ~(y <= threshold), result.decision
    if result.delta is None:
        after = before
    elif after is None:
        after = ~(y + result.delta <= threshold)
    return _times_indicator(gradient, before, after)


@register_recipe(aten.threshold_backward.default)
def threshold_backward_of_kept(gradient: Operand, result: Operand, threshold: float) -> Recipes:
    """The gradient, masked as the offset is."""
    if threshold != 0 or not (gradient.is_kept and result.is_kept):
        return {}
    sources = gradient.source(LOW), result.source(SIGNED)
    return {LOW: Recipe(sources, lambda g, y: kept(g, ~(y <= 0)))}


def _times_indicator(
    gradient: Operand, before: Tensor, after: Tensor, outside: float = 0.0
) -> Tensor:
    """``δ(g·s)`` for a slope s of 1 where the indicator holds and ``outside`` elsewhere."""
    u = gradient.offset
    change = kept(u, after & ~before) - kept(u, before & ~after)
    if gradient.delta is None:
        return (1 - outside) * change
    e = gradient.delta
    if outside == 0:
        return kept(e, after) + change
    return kept(e, after) + outside * kept(e, ~after) + (1 - outside) * change


def kept(x: Tensor, mask: Tensor) -> Tensor:
    """Return x where the mask holds, 0 elsewhere: as ``where``, without its branch an element."""
    bits = {4: torch.int32, 8: torch.int64}[x.itemsize]
    return (x.view(bits) & -mask.to(bits)).view(x.dtype)


def _normal_density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _gelu_slope(x: Tensor) -> Tensor:
    """Φ(x) + x·φ(x)."""
    return 0.5 * torch.erfc(-x * math.sqrt(0.5)) + x * _normal_density(x)


def _gelu_curvature(x: Tensor) -> Tensor:
    """φ(x)·(2 − x²)."""
    return _normal_density(x) * (2 - x * x)


_TANH_GELU_SCALE = math.sqrt(2 / math.pi)
_TANH_GELU_CUBIC = 0.044715


def _tanh_gelu_inner(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tanh's argument s = √(2/π)·(x + 0.044715 x³) with s′ and s″."""
    k, c = _TANH_GELU_SCALE, _TANH_GELU_CUBIC
    return k * x * (1 + c * x * x), k * (1 + 3 * c * x * x), 6 * k * c * x


def _tanh_gelu_slope(x: Tensor) -> Tensor:
    """With the logistic function, (1 + tanh s)/2 = σ(2s): σ + 2x·σ·σ(−2s)·s′."""
    s, ds, _ = _tanh_gelu_inner(x)
    p, q = torch.sigmoid(2 * s), torch.sigmoid(-2 * s)
    return p + 2 * x * p * q * ds


def _tanh_gelu_curvature(x: Tensor) -> Tensor:
    """Derivative of the slope: 2pq·(2s′ + x·s″ + 2x·s′²·(q − p)), p = σ(2s), q = σ(−2s)."""
    s, ds, dds = _tanh_gelu_inner(x)
    p, q = torch.sigmoid(2 * s), torch.sigmoid(-2 * s)
    return 2 * p * q * (2 * ds + x * dds + 2 * x * ds * ds * (q - p))


def _gelu_family(approximate: str) -> tuple[Callable, Callable, Callable]:
    def value(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x, approximate=approximate)

    if approximate == "none":
        return value, _gelu_slope, _gelu_curvature
    return value, _tanh_gelu_slope, _tanh_gelu_curvature


@register_rule(aten.gelu.default)
def gelu(x: Operand, *, approximate: str = "none") -> Tensor:
    """``x·Φ(x)`` or its tanh approximation, by :func:`smooth`."""
    value, slope, _ = _gelu_family(approximate)
    return smooth(value, slope, x)


@register_rule(aten.gelu_backward.default)
def gelu_backward(gradient: Operand, x: Operand, *, approximate: str = "none") -> Tensor:
    """``g·gelu′(x)``."""
    _, slope, curvature = _gelu_family(approximate)
    return times_smooth(gradient, slope, curvature, x)


def _silu_slope(x: Tensor) -> Tensor:
    """σ(x) + x·σ(x)·σ(−x)."""
    p, q = torch.sigmoid(x), torch.sigmoid(-x)
    return p + x * p * q


def _silu_curvature(x: Tensor) -> Tensor:
    """σ(x)·σ(−x)·(2 + x·(σ(−x) − σ(x)))."""
    p, q = torch.sigmoid(x), torch.sigmoid(-x)
    return p * q * (2 + x * (q - p))


@register_rule(aten.silu.default)
def silu(x: Operand) -> Tensor:
    """``x·σ(x)``, by :func:`smooth`."""
    return smooth(torch.nn.functional.silu, _silu_slope, x)


@register_rule(aten.silu_backward.default)
def silu_backward(gradient: Operand, x: Operand) -> Tensor:
    """``g·silu′(x)``."""
    return times_smooth(gradient, _silu_slope, _silu_curvature, x)


@register_rule(aten.softplus.default)
def softplus(x: Operand, beta: float = 1, threshold: float = 20) -> Tensor:
    """``log(1 + exp(βx))/β``, by :func:`smooth`; x itself where βx is beyond the threshold."""
    return smooth(
        lambda u: torch.nn.functional.softplus(u, beta, threshold),
        lambda u: _softplus_slope(u, beta, threshold),
        x,
        _softplus_radius(x, beta, threshold),
    )


@register_rule(aten.softplus_backward.default)
def softplus_backward(gradient: Operand, x: Operand, beta: float, threshold: float) -> Tensor:
    """``g·σ(βx)``, or g beyond the threshold."""
    return times_smooth(
        gradient,
        lambda u: _softplus_slope(u, beta, threshold),
        lambda u: torch.where(
            beta * u > threshold, 0, beta * torch.sigmoid(beta * u) * torch.sigmoid(-beta * u)
        ),
        x,
        _softplus_radius(x, beta, threshold),
    )


def _softplus_slope(u: Tensor, beta: float, threshold: float) -> Tensor:
    return torch.where(beta * u > threshold, 1, torch.sigmoid(beta * u))


def _softplus_radius(x: Operand, beta: float, threshold: float) -> Tensor | float:
    """Return half of the function's length scale; −1 across the threshold, where it jumps."""
    if x.delta is None:
        return 0.0
    before, after = beta * x.offset > threshold, beta * (x.offset + x.delta) > threshold
    return torch.where(before == after, 0.5 / abs(beta), -1.0)


@register_rule(aten.erf.default)
def erf(x: Operand) -> Tensor:
    """The error function, by :func:`smooth`."""
    return smooth(torch.erf, lambda u: 2 / math.sqrt(math.pi) * torch.exp(-u * u), x)


@register_rule(aten.sin.default)
def sin(x: Operand) -> Tensor:
    """``sin(u + e) − sin(u) = 2·cos(u + e/2)·sin(e/2)``."""
    return 2 * torch.cos(x.offset + x.delta / 2) * torch.sin(x.delta / 2)


@register_rule(aten.cos.default)
def cos(x: Operand) -> Tensor:
    """``cos(u + e) − cos(u) = −2·sin(u + e/2)·sin(e/2)``."""
    return -2 * torch.sin(x.offset + x.delta / 2) * torch.sin(x.delta / 2)


@register_rule(aten.pow.Tensor_Scalar)
def power(x: Operand, exponent: float) -> Any:
    """``x²`` by its own formula; other powers by :func:`smooth`, away from 0."""
    if exponent == 2:
        return x.delta * (2 * x.offset + x.delta)
    return smooth(
        lambda u: torch.pow(u, exponent),
        lambda u: exponent * torch.pow(u, exponent - 1),
        x,
        radius=x.offset.abs() / 4,
    )
