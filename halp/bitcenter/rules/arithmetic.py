"""Pointwise arithmetic, and the comparisons that decide."""

from typing import Any

import torch
from torch import Tensor

from halp.bitcenter.dispatch import Operand, on_both_values, register_handler, register_rule
from halp.bitcenter.rules.linear import bilinear

aten = torch.ops.aten


def weighted_sum(x: Any, y: Any, alpha: float) -> Tensor:
    """``δ(x + α·y) = e_x + α·e_y``, in the shape of the sum."""
    e_x = x.delta if isinstance(x, Operand) else None
    e_y = y.delta if isinstance(y, Operand) else None
    if e_x is not None and e_y is not None:
        return torch.add(e_x, e_y, alpha=alpha)
    shapes = [z.shape for z in (x, y) if isinstance(z, Operand)]
    e = e_x.clone() if e_x is not None else alpha * e_y
    return e if len(shapes) == 1 else e.expand(torch.broadcast_shapes(*shapes)).contiguous()


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
    """``δ√x = e / (√(u + e) + √u)``."""
    return x.delta / (torch.sqrt(x.offset + x.delta) + torch.sqrt(x.offset))


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
    u, e = x.exact, x.delta
    full = u + e
    stays = (u >= 0) == (full >= 0)
    return torch.where(stays, torch.where(u >= 0, e, -e), full.abs() - u.abs())


@register_rule(aten.where.self)
def where(condition: Any, x: Any, y: Any) -> Tensor:
    """The chosen delta; where offset and full value decide differently, the difference chosen."""
    e_x, e_y = (torch.zeros_like(z.offset) if z.delta is None else z.delta for z in (x, y))
    if type(condition) is Tensor:
        return torch.where(condition, e_x, e_y)
    old, new = condition.offset, condition.delta
    same = torch.where(new, e_x, e_y)
    jump = torch.where(new, x.exact + e_x, y.exact + e_y) - torch.where(old, x.exact, y.exact)
    return torch.where(old == new, same, jump)


@register_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x: Operand, mask: Any, value: Any) -> Tensor:
    """Zero where both fill; where only one does, the difference of what is there."""
    fill, e_fill = value, 0.0
    if isinstance(value, Operand):
        fill, e_fill = value.exact, 0.0 if value.delta is None else value.delta
    e = torch.zeros_like(x.offset) if x.delta is None else x.delta
    if type(mask) is Tensor:
        return torch.where(mask, e_fill, e)
    old, new = mask.offset, mask.delta
    jump = torch.where(new, fill + e_fill, x.exact + e) - torch.where(old, fill, x.exact)
    return torch.where(old == new, torch.where(new, e_fill, e), jump)


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
