"""Batch, layer and group normalization, one kernel each: nothing is rounded inside.

All three standardize: with the mean m and the variance v of x over some dimensions, ε and
r = 1/√(v + ε), it is x̂ = (x − m)·r and y = w·x̂ + b (Ioffe & Szegedy, arXiv 1502.03167; Ba et al.,
arXiv 1607.06450; Wu & He, arXiv 1803.08494). Statistics of the offset are of the unrounded one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from halp.bitcenter.dispatch import (
    HANDLERS,
    register_handler,
    register_key,
    register_rule,
)
from halp.bitcenter.offsets import EXACT, LOW
from halp.bitcenter.operands import Operand
from halp.bitcenter.rules.linear import delta_of
from halp.bitcenter.tensor import BitCenteredTensor

aten = torch.ops.aten


class Standardized(NamedTuple):
    """x̂ and r of the offset, and their deltas; ``dims`` that the statistics are over, if any."""

    x: Tensor
    delta_x: Tensor
    r: Tensor
    delta_r: Tensor | float
    mean: Tensor | float
    delta_mean: Tensor | float
    dims: tuple[int, ...]

    @property
    def full_x(self) -> Tensor:
        """x̂ of the full value."""
        return self.x + self.delta_x


def of_the_offset(
    x: Operand,
    shape: tuple[int, ...],
    dims: tuple[int, ...],
    *,
    eps: float = 0.0,
    mean_and_r: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x̂, m and r of the offset, see :func:`standardize`; cached offsets keep these."""

    def compute(u: Tensor, *known: Tensor) -> tuple[Tensor, ...]:
        u = u.reshape(shape)
        if known:
            each = [1 if i in dims else size for i, size in enumerate(shape)]
            mean, r = (statistic.view(each) for statistic in known)
        else:
            mean = u.mean(dims, keepdim=True)
            r = ((u - mean).square().mean(dims, keepdim=True) + eps).rsqrt()
        return (u - mean) * r, mean, r

    return x.keep(
        ("standardized", shape, dims),
        compute,
        *(mean_and_r or ()),
        forms=(LOW, EXACT, EXACT),
        of=2 if mean_and_r is None else mean_and_r[1],  # r, a result of every forward operation
    )


def standardize(
    x: Operand,
    shape: tuple[int, ...],
    dims: tuple[int, ...],
    *,
    eps: float = 0.0,
    mean_and_r: Any = None,
) -> Standardized:
    """Standardize x, viewed in a shape, over dimensions; the forward pass's m and r may be known.

    With d = u − m and c = e − mean(e): ``δv = mean(c·(2d + c))``, δr as of rsqrt, and
    ``δx̂ = c·(r + δr) + d·δr``. Where the delta takes most of the variance away, that cancels, and
    with f = d + e, ``v = mean((f − mean f)²)`` and ``δx̂ = (f − mean f)·(r + δr) − d·r``.
    """
    normal, mean, r = of_the_offset(x, shape, dims, eps=eps, mean_and_r=mean_and_r)
    e = delta_of(x).reshape(shape)
    normal, r = normal.to(e.dtype), r.to(e.dtype)
    d = normal / r
    u = x.exact.reshape(shape).to(e.dtype) if x.is_at_hand else d  # f may be off by a constant
    delta_mean = e.mean(dims, keepdim=True)
    c = e - delta_mean
    change = (c * (2 * d + c)).mean(dims, keepdim=True)
    shrinks = 2 * change < -(r**-2)
    full = torch.addcmul(e, u, shrinks.to(e.dtype))  # f where it shrinks, e elsewhere
    full = full - full.mean(dims, keepdim=True)
    if mean_and_r is None:
        shrunk_r = ((full * full).mean(dims, keepdim=True) + eps).rsqrt()
    else:
        shrunk_r = r + delta_of(mean_and_r[1]).view(r.shape)
    full_r = torch.where(shrinks, shrunk_r, (r**-2 + change).rsqrt())
    delta_r = torch.where(shrinks, full_r - r, -change * (r * full_r) ** 2 / (r + full_r))
    delta_x = full * full_r + d * torch.where(shrinks, -r, delta_r)
    return Standardized(normal, delta_x, r, delta_r, mean, delta_mean, dims)


def with_constants(x: Operand, mean: Operand, variance: Operand, eps: float) -> Standardized:
    """Standardize with statistics that are given: ``δx̂ = e·r``."""
    e, across = delta_of(x), _second(x.shape)

    def of_offset(u: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        r = (variance.view(across) + eps).rsqrt()
        return (u - mean.view(across)) * r, r

    normal, r = x.keep(("with constants", eps), of_offset, mean, variance, forms=(LOW, EXACT))
    normal, r = normal.to(e.dtype), r.to(e.dtype)
    return Standardized(normal, e * r, r, 0.0, 0.0, 0.0, ())


def affine(
    normal: Standardized, weight: Operand | None, bias: Operand | None, shape: Any, across: Any
) -> Tensor:
    """``δ(w·x̂ + b) = e_w·(x̂ + δx̂) + u_w·δx̂ + e_b``; ``across`` is w's shape in the result's."""
    delta = normal.delta_x.reshape(shape)
    if weight is not None:
        delta = weight.offset.view(across) * delta
        if weight.delta is not None:
            delta = delta + weight.delta.view(across) * normal.full_x.reshape(shape)
    if bias is not None and bias.delta is not None:
        delta = delta + bias.delta.view(across)
    return delta


def backward(
    gradient: Operand,
    normal: Standardized,
    weight: Operand | None,
    across: list[int],
    parameter_shape: list[int],
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Return the deltas of the gradients of x, w and b.

    With h = g·w and p = mean(h·x̂): ``g_x = r·(h − mean(h) − x̂·p)``, ``g_w = Σ g·x̂``, ``g_b = Σ g``.
    """
    g, e = gradient.offset, delta_of(gradient)
    of_x = of_weight = of_bias = None
    if wanted[0]:
        h, delta_h = g, e
        if weight is not None:
            w = weight.offset.view(across)
            h, delta_h = g * w, e * w
            if weight.delta is not None:
                delta_h = delta_h + (g + e) * weight.delta.view(across)
        shape = normal.x.shape
        of_x = _gradient_of_x(h.reshape(shape), delta_h.reshape(shape), normal).reshape(g.shape)
    if wanted[1]:
        x, delta_x = normal.full_x.reshape(g.shape), normal.delta_x.reshape(g.shape)
        of_weight = (e * x + g * delta_x).sum_to_size(across).reshape(parameter_shape)
    if wanted[2]:
        of_bias = e.sum_to_size(across).reshape(parameter_shape)
    return of_x, of_weight, of_bias


def _gradient_of_x(h: Tensor, delta_h: Tensor, normal: Standardized) -> Tensor:
    """``δ(r·k) = δr·(k + δk) + r·δk`` with k = h − mean(h) − x̂·p."""
    x, delta_x, r, delta_r, *_, dims = normal
    if not dims:
        return r * delta_h
    p = (h * x).mean(dims, keepdim=True)
    delta_p = (delta_h * normal.full_x + h * delta_x).mean(dims, keepdim=True)
    k = h - h.mean(dims, keepdim=True) - x * p
    delta_k = delta_h - delta_h.mean(dims, keepdim=True) - delta_x * (p + delta_p) - x * delta_p
    return delta_r * (k + delta_k) + r * delta_k


# Batch normalization: statistics over all dimensions but the second, or the running ones.


def _second(shape: torch.Size) -> list[int]:
    return [size if i == 1 else 1 for i, size in enumerate(shape)]


def _all_but_second(shape: torch.Size) -> tuple[int, ...]:
    return (0, *range(2, len(shape)))


@register_rule(aten.native_batch_norm.default)
def batch_norm(
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Any,
    running_variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """See :func:`standardize`; in evaluation, with the running statistics."""
    across = _second(x.shape)
    if not training:
        normal = with_constants(x, running_mean, running_variance, eps)
        return affine(normal, weight, bias, x.shape, across), None, None
    normal = standardize(x, tuple(x.shape), _all_but_second(x.shape), eps=eps)
    return affine(normal, weight, bias, x.shape, across), *_changes(normal, (x.shape[1],))


def _changes(normal: Standardized, shape: Any) -> tuple[Tensor, Tensor]:
    """Return the deltas of the statistics m and r."""
    return normal.delta_mean.reshape(shape), normal.delta_r.reshape(shape)  # type: ignore[union-attr]


_batch_norm_by_rule = HANDLERS[aten.native_batch_norm.default]


@register_handler(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,  # what compiled code calls
    aten._native_batch_norm_legit.no_stats,
)
def batch_norm_with_statistics(
    func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict
) -> Any:
    """The rule; in training, running statistics take one step towards those of the full value."""
    x, weight, bias, *running, training, momentum, eps = args
    op = aten.native_batch_norm.default
    if not training:
        given = (x, weight, bias, *running, False, momentum, eps)
        return _batch_norm_by_rule(op, like, given, kwargs)
    given = (x, weight, bias, None, None, True, momentum, eps)
    result = _batch_norm_by_rule(op, like, given, kwargs)
    cache = like.context.cache
    recording = cache is not None and cache.recording
    if running and running[0] is not None and not recording:
        for statistic, seen in zip(running, _statistics(x, like, eps), strict=True):
            statistic.mul_(1 - momentum).add_(seen.to(statistic.dtype), alpha=momentum)
    return result


def _statistics(x: Tensor, like: BitCenteredTensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of the full value, of each channel."""
    dims = _all_but_second(x.shape)
    if type(x) is not BitCenteredTensor:
        variance, mean = torch.var_mean(x, dims, correction=1)
        return mean, variance
    operand = Operand(x, like.context, like.delta.dtype)
    normal, mean, r = of_the_offset(operand, tuple(x.shape), dims, eps=eps)
    from_mean = normal / r if operand.delta is None else normal / r + operand.delta
    variance, shift = torch.var_mean(from_mean, dims, correction=1)
    return mean.flatten() + shift, variance


@register_key(aten.native_batch_norm.default)
@register_key(aten._native_batch_norm_legit.default)
def forward_without_running_statistics(args: tuple) -> tuple:
    """In training, what a batch gives does not depend on the running statistics."""
    x, weight, bias, *running, training, momentum, eps = args
    return (x, weight, bias, training, eps) if training else args


@register_key(aten.native_batch_norm_backward.default)
def backward_without_running_statistics(args: tuple) -> tuple:
    """Alike in the backward pass."""
    return (*args[:3], *args[5:]) if args[7] else args


@register_rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    gradient: Operand,
    x: Operand,
    weight: Operand | None,
    running_mean: Any,
    running_variance: Any,
    mean: Any,
    r: Any,
    training: bool,
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """See :func:`backward`."""
    across = _second(x.shape)
    if training:
        normal = standardize(x, tuple(x.shape), _all_but_second(x.shape), mean_and_r=(mean, r))
    else:
        normal = with_constants(x, running_mean, running_variance, eps)
    return backward(gradient, normal, weight, across, [x.shape[1]], wanted)


# Layer normalization: statistics of each sample over its last dimensions.


def _last_dims(shape: torch.Size, normalized: list[int]) -> tuple[int, ...]:
    return tuple(range(len(shape) - len(normalized), len(shape)))


def _last(shape: torch.Size, normalized: list[int]) -> list[int]:
    return [1] * (len(shape) - len(normalized)) + list(normalized)


@register_rule(aten.native_layer_norm.default)
def layer_norm(
    x: Operand, normalized: list[int], weight: Operand | None, bias: Operand | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`standardize`."""
    normal = standardize(x, tuple(x.shape), _last_dims(x.shape, normalized), eps=eps)
    across = _last(x.shape, normalized)
    return affine(normal, weight, bias, x.shape, across), normal.delta_mean, normal.delta_r  # type: ignore[return-value]


@register_rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    gradient: Operand,
    x: Operand,
    normalized: list[int],
    mean: Any,
    r: Any,
    weight: Operand | None,
    bias: Operand | None,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """See :func:`backward`."""
    dims = _last_dims(x.shape, normalized)
    normal = standardize(x, tuple(x.shape), dims, mean_and_r=(mean, r))
    return backward(gradient, normal, weight, _last(x.shape, normalized), normalized, wanted)


# Group normalization: statistics of each sample over groups of channels.


def _grouped(shape: torch.Size, groups: int) -> tuple[int, ...]:
    samples = shape[0]
    return samples, groups, shape.numel() // max(samples * groups, 1)


@register_rule(aten.native_group_norm.default)
def group_norm(
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    samples: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`standardize`."""
    normal = standardize(x, _grouped(x.shape, groups), (2,), eps=eps)
    delta = affine(normal, weight, bias, x.shape, _second(x.shape))
    return delta, *_changes(normal, (samples, groups))


@register_rule(aten.native_group_norm_backward.default)
def group_norm_backward(
    gradient: Operand,
    x: Operand,
    mean: Any,
    r: Any,
    weight: Operand | None,
    samples: int,
    channels: int,
    pixels: int,
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """See :func:`backward`."""
    normal = standardize(x, _grouped(x.shape, groups), (2,), mean_and_r=(mean, r))
    return backward(gradient, normal, weight, _second(x.shape), [channels], wanted)
