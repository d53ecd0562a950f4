"""Operations that are linear in each operand: matrix products, sums, and moving elements about."""

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halp.bitcenter.cache import Recipe, Recipes
from halp.bitcenter.dispatch import register_recipe, register_rule
from halp.bitcenter.offsets import LOW
from halp.bitcenter.operands import Operand

aten = torch.ops.aten


def bilinear(op: Callable[[Any, Any], Tensor], x: Any, y: Any) -> Any:
    """``δ(x·y) = e_x·(u_y + e_y) + u_x·e_y``; the half of a constant or a number is skipped.

    None for two constants.
    """
    if not isinstance(x, Operand):
        return op(x, y.delta)
    if not isinstance(y, Operand):
        return op(x.delta, y)
    if x.delta is None:
        return None if y.delta is None else op(x.offset, y.delta)
    if y.delta is None:
        return op(x.delta, y.offset)
    return op(x.delta, y.offset + y.delta).add_(op(x.offset, y.delta))


@register_rule(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def product(x: Operand, y: Operand) -> Tensor:
    """A matrix product is bilinear (``matmul`` takes the same shapes as each of these)."""
    return bilinear(torch.matmul, x, y)


@register_rule(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def add_product(
    bias: Operand, x: Operand, y: Operand, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """``δ(β·b + α·x·y) = β·e_b + α·δ(x·y)``, one kernel."""
    if x.delta is None and y.delta is None:
        delta = torch.zeros_like(torch.matmul(x.offset, y.offset))
    else:
        delta = bilinear(torch.matmul, x, y)
    if alpha != 1:
        delta.mul_(alpha)
    return delta if bias.delta is None else delta.add_(bias.delta, alpha=beta)


def same_operation(op: Callable, *args: Any, **kwargs: Any) -> Any:
    """The delta of a linear operation is the operation on the deltas.

    An index that the full value sets differently adds ``op(u, new index) − op(u, old index)``.
    """
    delta = op(*replace_operands(args, delta_of, after), **kwargs)
    if any(isinstance(x, Operand) and x.decides for x in _flat(args)):
        new = op(*replace_operands(args, exact, after), **kwargs)
        delta = delta + (new - op(*replace_operands(args, exact, before), **kwargs))
    return delta


def replace_operands(
    values: Any, of_float: Callable[[Operand], Tensor], of_index: Callable[[Operand], Tensor]
) -> list:
    """Return arguments with floating-point operands and indices replaced by parts of them."""
    return [
        replace_operands(value, of_float, of_index)
        if type(value) is list
        else value
        if type(value) is not Operand
        else of_index(value)
        if value.decides
        else of_float(value)
        for value in values
    ]


def delta_of(x: Operand) -> Tensor:
    """Return the delta of an operand: zeros for a constant."""
    return torch.zeros_like(x.offset) if x.delta is None else x.delta


exact, before, after = (operator.attrgetter(name) for name in ("exact", "before", "after"))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if type(value) is list:
            yield from _flat(value)
        else:
            yield value


@register_rule(aten.cat.default)
def cat(parts: list[Operand], dim: int = 0) -> Tensor:
    """The concatenated deltas."""
    return torch.cat(_deltas_of(parts), dim)


@register_rule(aten.stack.default)
def stack(parts: list[Operand], dim: int = 0) -> Tensor:
    """The stacked deltas."""
    return torch.stack(_deltas_of(parts), dim)


def _deltas_of(parts: list[Any]) -> list[Tensor]:
    """Return the deltas of operands; of plain tensors, integers too, zeros."""
    dtype = next(part.delta.dtype for part in parts if getattr(part, "delta", None) is not None)
    return [
        part.delta
        if isinstance(part, Operand) and part.delta is not None
        else torch.zeros(part.shape, dtype=dtype, device=part.device)
        for part in parts
    ]


@register_rule(aten.constant_pad_nd.default)
def pad(x: Operand, widths: list[int], value: float = 0) -> Tensor:
    """The deltas padded with zeros, whatever the value."""
    return aten.constant_pad_nd(x.delta, widths, 0)


@register_rule(aten.scatter.value)
def scatter_value(x: Operand, dim: int, index: Any, value: float) -> Tensor:
    """Zero where the value goes; where only one of offset and full value puts it, a jump."""
    if not isinstance(index, Operand):
        return x.delta.scatter(dim, index, 0)
    u = x.exact
    jump = u.scatter(dim, index.after, value) - u.scatter(dim, index.before, value)
    return delta_of(x).scatter(dim, index.after, 0) + jump


def moved_of_kept(op: Callable, *args: Any) -> Recipes:
    """Elements that only move are found by moving what is kept of where they come from."""
    operands = [x for x in _flat(args) if isinstance(x, Operand)]
    if not operands or any(x.decides or not x.is_kept for x in operands):
        return {}

    def moved(*parts: Tensor) -> Tensor:
        remaining = iter(parts)
        return operands[0].nearest(op(*replace_operands(args, lambda _: next(remaining), after)))

    return {LOW: Recipe(tuple(x.source(LOW) for x in operands), moved)}


@register_recipe(aten.constant_pad_nd.default)
def padded_of_kept(x: Operand, widths: list[int], value: float = 0) -> Recipes:
    """See :func:`moved_of_kept`."""
    if value != 0:
        return {}
    return moved_of_kept(aten.constant_pad_nd.default, x, widths)


for _op in (
    aten.cat.default,
    aten.stack.default,
    aten.embedding.default,
    aten.flip.default,
    aten.roll.default,
    aten.repeat.default,
    aten.gather.default,
    aten.index_select.default,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.diagonal_backward.default,
):
    register_recipe(_op)(partial(moved_of_kept, _op))

for _op in (
    aten.neg.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.cumsum.default,
    aten.flip.default,
    aten.roll.default,
    aten.repeat.default,
    aten.tril.default,
    aten.triu.default,
    aten.gather.default,
    aten.index_select.default,
    aten.index.Tensor,
    aten.index_add.default,
    aten.index_put.default,
    aten.scatter.src,
    aten.scatter_add.default,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.diagonal_backward.default,
    aten.native_dropout_backward.default,
    aten.trace.default,
):
    register_rule(_op)(partial(same_operation, _op))
