"""Pooling of any dimension: averages are linear, a maximum has a winner in each window."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from halp.bitcenter.dispatch import Operand, register_handler, register_rule, wrap
from halp.bitcenter.rules.activation import kept
from halp.bitcenter.rules.linear import delta_of, same_operation
from halp.bitcenter.tensor import BitCenteredTensor

aten = torch.ops.aten

for _op in (
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
):
    register_rule(_op)(partial(same_operation, _op))


def average_backward(op: OpOverload, gradient: Operand, x: Operand, *how: Any) -> Tensor | None:
    """Linear in the gradient; of the input only the shape is read."""
    if gradient.delta is None:
        return None
    return op(gradient.delta, gradient.delta.new_empty(x.shape), *how)


for _op in (
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
):
    register_rule(_op)(partial(average_backward, _op))


class Windows(NamedTuple):
    """Where the windows lie along one dimension.

    Attributes:
        at: of shape (longest window, number of windows): positions in the input.
        valid: of the same shape: False where a window is shorter, or lies on padding.
    """

    at: Tensor
    valid: Tensor


def sliding_windows(
    size: int, windows: int, kernel: int, stride: int, padding: int, dilation: int
) -> Windows:
    """Return the windows of an ordinary pool."""
    at = torch.arange(kernel).unsqueeze(1) * dilation + torch.arange(windows) * stride - padding
    return Windows(at.clamp(0, size - 1), (at >= 0) & (at < size))


def adaptive_windows(size: int, windows: int) -> Windows:
    """Return windows i from ⌊i·size/windows⌋ to ⌈(i + 1)·size/windows⌉."""
    start = torch.arange(windows) * size // windows
    end = -(-(torch.arange(windows) + 1) * size // windows)
    at = start + torch.arange(int((end - start).max())).unsqueeze(1)
    return Windows(at.clamp(max=size - 1), at < end)


@register_handler(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool(
    func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict
) -> tuple[Tensor, Tensor]:
    """See :func:`winners`."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dims = _dims(func)

    def each(name: str, default: Any) -> list[int]:
        value = given.get(name) or default
        value = [value] if isinstance(value, int) else list(value)
        return value * dims if len(value) == 1 else value

    kernel = each("kernel_size", None)
    ways = (kernel, each("stride", kernel), each("padding", 0), each("dilation", 1))

    def windows_along(i: int, size: int, windows: int) -> Windows:
        return sliding_windows(size, windows, *(way[i] for way in ways))

    return _pool(func, x, args, kwargs, windows_along)


@register_handler(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(
    func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict
) -> tuple[Tensor, Tensor]:
    """See :func:`winners`."""
    return _pool(func, x, args, kwargs, lambda _, size, windows: adaptive_windows(size, windows))


def _dims(func: OpOverload) -> int:
    return 3 if "3d" in func._schema.name else 2


def _pool(
    func: OpOverload,
    x: BitCenteredTensor,
    args: tuple,
    kwargs: dict,
    windows_along: Callable[[int, int, int], Windows],
) -> tuple[Tensor, Tensor]:
    best, before = func(x.offset, *args[1:], **kwargs)
    if x.is_constant:
        return BitCenteredTensor.constant(best, x.context, x.delta.dtype), before
    dims = _dims(func)
    sizes = zip(x.shape[-dims:], best.shape[-dims:], strict=True)
    windows = [windows_along(i, size, n) for i, (size, n) in enumerate(sizes)]
    delta, after = winners(x.offset, x.delta, best, windows)
    return wrap(best, delta, x), BitCenteredTensor(before, after, x.context)


def winners(u: Tensor, e: Tensor, best: Tensor, windows: list[Windows]) -> tuple[Tensor, Tensor]:
    """Return ``δ max(x) = maxᵢ((uᵢ − max u) + eᵢ)``, and the i that wins: first of equals.

    The gaps are taken from the unrounded offset: nothing that is not about to win cancels.

    Args:
        u, e: offset and delta, of which the last dimensions are pooled.
        best: the pooled offset.
        windows: along each of these dimensions.

    Returns:
        The delta in e's dtype, and flat indices into the pooled dimensions.
    """
    finite = torch.finfo(u.dtype).max  # the gap between equals is zero, infinite ones too
    u, best = u.clamp(-finite, finite), best.clamp(-finite, finite)
    dims = range(-len(windows), 0)
    windows = [Windows(at.to(u.device), valid.to(u.device)) for at, valid in windows]
    candidates, indices = [], []
    for position in itertools.product(*(range(len(along.at)) for along in windows)):
        u_i, e_i = u, e
        index = torch.zeros((), dtype=torch.int64, device=u.device)
        valid = torch.ones((), dtype=torch.bool, device=u.device)
        for dim, along, i in zip(dims, windows, position, strict=True):
            at, across = along.at[i], [-1] + [1] * (-1 - dim)
            u_i, e_i = u_i.index_select(dim, at), e_i.index_select(dim, at)
            index = index * u.shape[dim] + at.view(across)
            valid = valid & along.valid[i].view(across)
        gap = (u_i - best).to(e.dtype)
        candidates.append((gap + e_i).masked_fill_(~valid, -torch.inf))
        indices.append(index)
    change, which = torch.stack(candidates).max(0)
    table = torch.stack(indices).view(len(indices), *[1] * (u.dim() - len(windows)), *index.shape)
    return change, table.expand(-1, *best.shape).gather(0, which.unsqueeze(0)).squeeze(0)


def max_pool_backward(op: OpOverload, gradient: Operand, x: Operand, *how: Any) -> Any:
    """The delta goes to the new winner; where that is another, so does the offset, from the old."""
    *geometry, winner = how
    e = delta_of(gradient)
    like = e.new_empty(x.shape)

    def route(g: Tensor, winner: Tensor) -> Tensor:
        return op(g, like, *geometry, winner)

    if not isinstance(winner, Operand):
        return route(e, winner)
    moved = kept(gradient.offset, winner.before != winner.after)
    return route(e + moved, winner.after) - route(moved, winner.before)


for _op in (
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
):
    register_rule(_op)(partial(max_pool_backward, _op))
