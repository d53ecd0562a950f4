"""Pointwise arithmetic, and the comparisons that decide."""

from typing import Any

import torch
from torch import Tensor

from halp.bitcenter.dispatch import on_both_values, register_handler, register_rule
from halp.bitcenter.offsets import SIGNED
from halp.bitcenter.operands import Operand
from halp.bitcenter.rules.linear import bilinear

aten = torch.ops.aten


def weighted_sum(x: Any, y: Any, alpha: float) -> Tensor:
    """``δ(x + α·y) = e_x + α·e_y``, in the shape of the sum."""
    operands = [z for z in (x, y) if isinstance(z, Operand)]
    shape = torch.broadcast_shapes(*(z.shape for z in operands))
    e_x: Any = getattr(x, "delta", None)
    e_y: Any = getattr(y, "delta", None)
    if e_x is not None and e_y is not None:
        return torch.add(e_x, e_y, alpha=alpha)
    delta = e_x.clone() if e_x is not None else alpha * e_y
    return delta if delta.shape == shape else delta.expand(shape).contiguous()


@register_rule(aten.add.Tensor, aten.add.Scalar)
def add(x: Any, y: Any, alpha: float = 1) -> Tensor:
    """``δ(x + α·y) = e_x + α·e_y``."""
    return weighted_sum(x, y, alpha)


@register_rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(x: Any, y: Any, alpha: float = 1) -> Tensor:
    """``δ(x − α·y) = e_x − α·e_y``."""
    return weighted_sum(x, y, -alpha)


@register_rule(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(x: Any, y: Any, alpha: float = 1) -> Tensor:
    """``δ(y − α·x) = e_y − α·e_x``."""
    return weighted_sum(y, x, -alpha)


@register_rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(x: Any, y: Any) -> Tensor:
    """``δ(x·y) = e_x·(u_y + e_y) + u_x·e_y``."""
    return bilinear(torch.mul, x, y)


@register_rule(aten.div.Tensor, aten.div.Scalar)
def div(x: Any, y: Any) -> Tensor:
    """``δ(x/y) = (e_x·u_y − u_x·e_y) / (u_y·(u_y + e_y))``."""
    if not isinstance(y, Operand):
        return x.delta / y
    if y.delta is None:
        return x.delta / y.offset
    u_x, e_x = (x.offset, x.delta) if isinstance(x, Operand) else (x, None)
    numerator = -u_x * y.delta if e_x is None else e_x * y.offset - u_x * y.delta
    return numerator / (y.offset * (y.offset + y.delta))


@register_rule(aten.reciprocal.default)
def reciprocal(x: Operand) -> Tensor:
    """``δ(1/x) = −e / (u·(u + e))``."""
    return -x.delta / (x.offset * (x.offset + x.delta))


@register_rule(aten.square.default)
def square(x: Operand) -> Tensor:
    """``δ(x²) = e·(2u + e)``."""
    return x.delta * (2 * x.offset + x.delta)


@register_rule(aten.sqrt.default)
def sqrt(x: Operand) -> Tensor:
    """``δ√x = e / (√(u + e) + √u)``; of zero, zero."""
    roots = torch.sqrt(x.offset + x.delta) + torch.sqrt(x.offset)
    return x.delta / torch.where(roots == 0, 1, roots)


@register_rule(aten.rsqrt.default)
def rsqrt(x: Operand) -> Tensor:
    """``δ(1/√x) = −e / (√u·√(u + e)·(√u + √(u + e)))``."""
    root, full_root = torch.sqrt(x.offset), torch.sqrt(x.offset + x.delta)
    return -x.delta / (root * full_root * (root + full_root))


@register_rule(aten.exp.default)
def exp(x: Operand) -> Tensor:
    """``δ(exp x) = exp(u)·expm1(e)``; of ``expm1`` alike, since they differ by a constant."""
    return torch.exp(x.offset) * torch.expm1(x.delta)


register_rule(aten.expm1.default)(exp)


@register_rule(aten.log.default)
def log(x: Operand) -> Tensor:
    """``δ(log x) = log1p(e / u)``."""
    return torch.log1p(x.delta / x.offset)


@register_rule(aten.log1p.default)
def log1p(x: Operand) -> Tensor:
    """``δ(log(1 + x)) = log1p(e / (1 + u))``."""
    return torch.log1p(x.delta / (1 + x.offset))


@register_rule(aten.abs.default)
def absolute(x: Operand) -> Tensor:
    """``δ|x| = sgn(u)·e`` while the sign stays; past it, the difference of the magnitudes."""
    u, e = x.signed, x.delta
    full = u + e
    stays = (u >= 0) == (full >= 0)
    return torch.where(stays, torch.where(u >= 0, e, -e), full.abs() - u.abs())


@register_rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(condition: Any, x: Any, y: Any) -> Tensor:
    """The chosen delta, and how the chosen offset jumps where the full value decides otherwise."""
    e_x, e_y = delta_or_zero(x), delta_or_zero(y)
    if type(condition) is Tensor:
        return torch.where(condition, e_x, e_y)
    u_x, u_y = (z.exact if isinstance(z, Operand) else z for z in (x, y))
    old, new = condition.before, condition.after
    jump = torch.where(new, u_x, u_y) - torch.where(old, u_x, u_y)
    return torch.where(new, e_x, e_y) + jump


def delta_or_zero(x: Any) -> Any:
    """Return e of an operand or a number: 0.0 for a constant."""
    return 0.0 if not isinstance(x, Operand) or x.delta is None else x.delta


@register_rule(aten.maximum.default)
def maximum(x: Operand, y: Operand) -> Tensor:
    """See :func:`larger_change`."""
    gap = x.keep("gap", torch.sub, y, form=SIGNED)
    return larger_change(gap, delta_or_zero(x), delta_or_zero(y))


@register_rule(aten.minimum.default)
def minimum(x: Operand, y: Operand) -> Tensor:
    """``min(x, y) = −max(−x, −y)``."""
    gap = x.keep("gap below", lambda x, y: y - x, y, form=SIGNED)
    return -larger_change(gap, -delta_or_zero(x), -delta_or_zero(y))


def larger_change(gap: Tensor, e_x: Any, e_y: Any) -> Tensor:
    """``δ max(x, y) = max(e_x, e_y − g)`` if g = u_x − u_y > 0, else ``max(e_y, e_x + g)``."""
    first_leads = gap > 0
    own = torch.where(first_leads, e_x, e_y)
    other = torch.where(first_leads, e_y, e_x) - gap.abs()
    return torch.maximum(own, other.to(own.dtype))


@register_rule(aten.clamp.default)
def clamp(x: Operand, low: float | None = None, high: float | None = None) -> Tensor:
    """``min(max(x, low), high)``, changed by one bound after the other."""
    e = x.delta
    if low is not None:
        above = x.keep(("above", low), lambda u: u - low, form=SIGNED)
        e = larger_change(above, e, 0.0)
    if high is not None:
        least = -torch.inf if low is None else low
        below = x.keep(("below", low, high), lambda u: high - u.clamp(min=least), form=SIGNED)
        e = -larger_change(below, -e, 0.0)
    return e


@register_rule(aten.clamp_min.default)
def clamp_min(x: Operand, low: float) -> Tensor:
    """See :func:`clamp`."""
    return clamp(x, low=low)


@register_rule(aten.clamp_max.default)
def clamp_max(x: Operand, high: float) -> Tensor:
    """See :func:`clamp`."""
    return clamp(x, high=high)


@register_rule(aten.hardtanh.default)
def hardtanh(x: Operand, low: float = -1, high: float = 1) -> Tensor:
    """A clamp (ReLU6 is one)."""
    return clamp(x, low=low, high=high)


@register_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x: Operand, mask: Any, value: Any) -> Tensor:
    """``where(mask, value, x)``."""
    return where(mask, value, x)


register_handler(
    *(
        getattr(getattr(aten, name), overload)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for overload in ("Scalar", "Tensor")
    ),
    aten.argmax.default,
    aten.argmin.default,
    aten.argsort.default,
    aten.ceil.default,
    aten.floor.default,
    aten.isinf.default,
    aten.isnan.default,
    aten.logical_not.default,
    aten.round.default,
    aten.sgn.default,
    aten.sign.default,
    aten.signbit.default,
    aten.trunc.default,
)(on_both_values)
