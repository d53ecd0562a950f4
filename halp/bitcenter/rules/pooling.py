"""Pooling of any dimension: averages are linear, a maximum has a winner in each window."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from halp.bitcenter.cache import NOT_RECORDED, CacheError, Recipe, Recipes
from halp.bitcenter.dispatch import (
    register_handler,
    register_recipe,
    register_rule,
    wrap,
)
from halp.bitcenter.offsets import LOW, SIGNED
from halp.bitcenter.operands import Operand
from halp.bitcenter.replay import kept_result
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
    def windows_of(pooled: Any) -> list[Windows]:
        dims = _dims(func)
        sizes = enumerate(zip(x.shape[-dims:], pooled[-dims:], strict=True))
        windows = [windows_along(i, size, n) for i, (size, n) in sizes]
        return [Windows(at.to(x.device), valid.to(x.device)) for at, valid in windows]

    if x.context.is_cached:
        return _kept_pool(func, x, args, kwargs, windows_of)
    u, e = x._offset.tensor, x.context.read(x.delta)
    best, before = func(u, *args[1:], **kwargs)
    if x.is_constant:
        return BitCenteredTensor.constant(best, x.context, x.delta.dtype), before
    windows = windows_of(best.shape)
    delta, after = winners(gaps_to(best, u, windows).to(e.dtype), e, windows)
    return wrap(best, delta, x), BitCenteredTensor(before, after, x.context)


def _kept_pool(
    func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict, windows_of: Callable
) -> tuple[Tensor, Tensor]:
    """Pool where offsets are cached: of the input, each window's gaps to its winner are kept."""
    cache = x.context.cache
    assert cache is not None
    keys = cache.key_of_result(0), cache.key_of_result(1)
    gap_key, dtype = hash(("gaps", keys[0])), x.delta.dtype
    best: Any = None
    before: Any = None
    delta: Any = None
    if cache.recording:
        best, before = func(x._offset.computed, *args[1:], **kwargs)
        cache.keep_layout(keys[0], best)
    if x.is_constant:
        parts = zip(keys, (best, before), strict=True)
        return tuple(kept_result(x, key, part, None) for key, part in parts)
    if cache.recording:
        windows = windows_of(best.shape)
        cache.keep(
            gap_key, SIGNED, lambda: _marked_gaps(best, before, x._offset.computed, windows), dtype
        )
        delta = after = before
    else:
        layout = cache.layout(keys[0])
        gaps, marks = (cache.fetch(gap_key, form, dtype) for form in (LOW, SIGNED))
        if layout is None or gaps is None or marks is None:
            raise CacheError(NOT_RECORDED)
        windows = windows_of(layout.shape)
        delta, after = winners(gaps, x.context.read(x.delta), windows)
        before = _chosen(marks.max(0).indices, windows, x.shape)
    pooled = kept_result(x, keys[0], best, delta)
    return pooled, BitCenteredTensor(before, after, x.context)


def _marked_gaps(best: Tensor, before: Tensor, u: Tensor, windows: list[Windows]) -> Tensor:
    """Return the gaps to the winners; those of the winners are above zero, if only just.

    What lies outside of a window has none.
    """
    index, valid = _places(windows, u.shape)
    gaps = gaps_to(best, u, windows).masked_fill_(~valid, 0)
    wins = (index == before).logical_and_(valid)
    return torch.where(wins, torch.finfo(u.dtype).smallest_normal, gaps)


def gaps_to(best: Tensor, u: Tensor, windows: list[Windows]) -> Tensor:
    """Return ``u − max u`` by position in the window: nothing that is not about to win cancels.

    Args:
        best: the pooled offset.
        u: the unrounded offset, of which the last dimensions are pooled.
        windows: along each of these dimensions.
    """
    finite = torch.finfo(u.dtype).max  # the gap between equals is zero, infinite ones too
    return _gathered(u.clamp(-finite, finite), windows) - best.clamp(-finite, finite)


def winners(gaps: Tensor, e: Tensor, windows: list[Windows]) -> tuple[Tensor, Tensor]:
    """Return ``δ max(x) = maxᵢ(gapᵢ + eᵢ)``, and flat indices of the i that wins: first of equals.

    Args:
        gaps: see :func:`gaps_to`.
        e: the delta.
        windows: along each pooled dimension.
    """
    _, valid = _places(windows, e.shape)
    candidates = (gaps + _gathered(e, windows)).masked_fill_(~valid, -torch.inf)
    change, which = candidates.max(0)
    return change, _chosen(which, windows, e.shape)


def _positions(windows: list[Windows]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(along.at)) for along in windows))


def _gathered(x: Tensor, windows: list[Windows]) -> Tensor:
    """Return the elements of all windows, position by position in a first dimension."""
    parts = []
    for position in _positions(windows):
        part = x
        for dim, along, i in zip(range(-len(windows), 0), windows, position, strict=True):
            part = part.index_select(dim, along.at[i])
        parts.append(part)
    return torch.stack(parts)


def _places(windows: list[Windows], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return by position each window's flat index into the input, and whether it lies inside."""
    indices, inside = [], []
    for position in _positions(windows):
        index = torch.zeros((), dtype=torch.int64, device=windows[0].at.device)
        valid = torch.ones((), dtype=torch.bool, device=index.device)
        for dim, along, i in zip(range(-len(windows), 0), windows, position, strict=True):
            across = [-1] + [1] * (-1 - dim)
            index = index * shape[dim] + along.at[i].view(across)
            valid = valid & along.valid[i].view(across)
        indices.append(index)
        inside.append(valid)
    dims = [len(indices), *[1] * (len(shape) - len(windows)), *indices[0].shape]
    return torch.stack(indices).view(dims), torch.stack(inside).view(dims)


def _chosen(which: Tensor, windows: list[Windows], shape: torch.Size) -> Tensor:
    """Return the flat indices of chosen positions."""
    index, _ = _places(windows, shape)
    return index.expand(-1, *which.shape).gather(0, which.unsqueeze(0)).squeeze(0)


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


def max_pool_backward_of_kept(op: OpOverload, gradient: Operand, x: Operand, *how: Any) -> Recipes:
    """Where windows do not overlap: what is kept of the gradient, at the offset's winners."""
    *geometry, winner = how
    if not (geometry and isinstance(winner, Operand) and gradient.is_kept):
        return {}  # adaptive windows may overlap
    kernel, stride = geometry[0], geometry[1] or geometry[0]
    if any(k > s for k, s in zip(kernel, stride * len(kernel), strict=False)):
        return {}
    shape, before = x.shape, winner.before

    def route(g: Tensor) -> Tensor:
        return op(g, g.new_empty(shape), *geometry, before)

    return {LOW: Recipe((gradient.source(LOW),), route)}


for _op in (
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
):
    register_rule(_op)(partial(max_pool_backward, _op))
    register_recipe(_op)(partial(max_pool_backward_of_kept, _op))
