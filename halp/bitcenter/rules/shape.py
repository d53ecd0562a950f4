"""Views and copies: the same operation on both parts, which never rounds."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import return_and_correct_aliasing

from halp.bitcenter.cache import KeptOffset, Recipe, Source
from halp.bitcenter.dispatch import register_handler
from halp.bitcenter.offsets import EXACT, LOW, SIGNED, Offset
from halp.bitcenter.replay import kept_constant
from halp.bitcenter.tensor import BitCenteredTensor, writes_counted
from halp.bitcenter.writes import assign
from halp.calls import call
from halp.random_bits import is_traced

aten = torch.ops.aten


@register_handler(
    aten.as_strided.default,
    aten.diagonal.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unfold.default,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
)
def view(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> Any:
    """Alias both parts: writing to the view writes to both parts of its base."""

    how = args[1:]  # not x: what is remembered must not hold on to an autograd graph

    def see(part: Tensor) -> Tensor:
        return func(part, *how, **kwargs)

    if func is aten.as_strided.default:
        see = _strided(x, *how, **kwargs)
    if is_traced(x.delta):
        result = BitCenteredTensor(see(x.offset), see(x.delta), x.context)
        return return_and_correct_aliasing(func, args, kwargs, result)
    base = x._offset
    name = hash((func._schema, repr(how), repr(kwargs))) if x.context.cache is not None else 0
    with writes_counted():
        if not base.is_computed:
            offset = x.context.defer(lambda: see(base.computed))
        else:
            offset = base.view(see, name)
        delta = _delta_of_view(x, offset, see)
    return BitCenteredTensor(offset, delta, x.context, x.dtype)


def _strided(x: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Return what sees a part as strided, wherever it begins: in a cache it lies among others.

    A rounded copy of what has gaps between its elements has none until it is given them here, full
    of NaN.
    """
    own_stride = x.stride()
    start: Any = 0
    if storage_offset is not None:
        start = storage_offset - x.storage_offset()

    def see(part: Tensor) -> Tensor:
        if part.stride() != own_stride:
            length = 1 + sum((n - 1) * k for n, k in zip(part.shape, own_stride, strict=True))
            memory = part.new_full((max(length, 0),), torch.nan)
            part = memory.as_strided(part.shape, own_stride).copy_(part)
        return part.as_strided(size, stride, part.storage_offset() + start)

    return see


def _delta_of_view(x: BitCenteredTensor, offset: Offset, see: Any) -> Tensor:
    """Return the view of a delta; while a cache records, it may be a stand-in of no memory."""
    if offset.is_recorded and 0 in x.delta.stride():
        return x.delta.new_zeros(()).expand(offset.computed.shape)
    return see(x.delta)


#: In-place views, and the views that they are.
_IN_PLACE_VIEWS = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


@register_handler(*_IN_PLACE_VIEWS)
def view_in_place(
    func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict
) -> BitCenteredTensor:
    """Change the shape of both parts, and of the tensor that wraps them."""
    seen = view(_IN_PLACE_VIEWS[func], x, args, kwargs)
    x._offset, x.delta, x._constant, x.decision = seen._offset, seen.delta, None, None
    with no_dispatch():
        func(*args, **kwargs)
    return x


@register_handler(aten.resize_.default, aten.resize_as_.default)
def resize(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> BitCenteredTensor:
    """Leave a tensor of that size as it is.

    Raises:
        NotImplementedError: it has another size.
    """
    size = tuple(args[1].shape if isinstance(args[1], Tensor) else args[1])
    if type(x) is BitCenteredTensor and x is args[0] and tuple(x.shape) == size:
        return x
    raise NotImplementedError(
        f"{func} of a bit-centered tensor would uncover memory that holds no offset and delta; "
        f"use x.reshape{size}, a slice, or torch.nn.functional.pad, which make new tensors"
    )


@register_handler(
    aten.set_.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.set_.source_Tensor_storage_offset,
)
def refuse_set(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> Any:
    """Refuse to put a tensor on other memory.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{func} would drop one half of a bit-centered tensor; write x.copy_(t), which sets the "
        "offset to t and the delta to zero"
    )


@register_handler(aten.alias.default, aten.detach.default)
def alias(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> Any:
    """Share both parts as they are, and what is known of them."""
    if is_traced(x.delta):
        result = BitCenteredTensor(func(x.offset), func(x.delta), x.context)
        result = return_and_correct_aliasing(func, args, kwargs, result)
    else:
        result = BitCenteredTensor(x._offset, x.delta, x.context, x.dtype)
        result._constant = x._constant
    result.decision = x.decision
    return result


@register_handler(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
def views(
    func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict
) -> list[BitCenteredTensor]:
    """Several views at once; those of unsafe splits are tensors of their own to whoever writes."""
    how = args[1:]
    split = _Split(lambda part: func(part, *how, **kwargs))
    independent = "unsafe" in func._schema.name
    name = hash((func._schema, repr(how), repr(kwargs))) if x.context.cache is not None else 0
    base = x._offset
    with writes_counted():
        deltas = split(x.delta)
        parts = [split.part(i) for i in range(len(deltas))]
        if not independent:
            if not base.is_computed:
                base.computed  # noqa: B018  # views of what is deferred would miss writes
            offsets = [base.view(see, hash((name, i))) for i, see in enumerate(parts)]
        elif x.context.is_cached:
            offsets = [_copy_of(x, see, i) for i, see in enumerate(parts)]
        else:
            offsets = [Offset(part) for part in split(base.computed)]
    return [
        BitCenteredTensor(offset, delta, x.context, x.dtype)
        for offset, delta in zip(offsets, deltas, strict=True)
    ]


class _Split:
    """Splits tensors into views, and remembers the last one."""

    def __init__(self, split: Any) -> None:
        self._split = split
        self._last: tuple[Tensor, Any] | None = None

    def __call__(self, x: Tensor) -> Any:
        if self._last is None or self._last[0] is not x:
            self._last = x, self._split(x)
        return self._last[1]

    def part(self, i: int) -> Any:
        """Return what gives the view with a number."""
        return lambda x: self(x)[i]


@register_handler(aten.clone.default, aten.contiguous.default, aten.lift_fresh.default)
def copy(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> BitCenteredTensor:
    """Copy both parts."""

    def copied(part: Tensor) -> Tensor:
        return func(part, *args[1:], **kwargs)

    delta = copied(x.delta)
    offset: Any = _copy_of(x, copied) if x.context.is_cached else copied(x.offset)
    result = BitCenteredTensor(offset, delta, x.context, x.dtype)
    result.decision = x.decision
    return result


def _copy_of(x: BitCenteredTensor, copied: Any, number: int = 0) -> Offset:
    """Return an offset, a result of the operation, of which a cache keeps only the original."""
    cache = x.context.cache
    assert cache is not None
    original = x._offset.frozen()
    return KeptOffset(
        x.context,
        copied(x._offset.computed) if cache.recording else None,
        key=cache.key_of_result(number),
        delta_dtype=x.delta.dtype,
        recipes={form: Recipe((Source(form, original),), copied) for form in (LOW, SIGNED, EXACT)},
    )


@register_handler(aten._to_copy.default)
def convert(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> BitCenteredTensor:
    """Move to another device, or to float32 or float64; integers keep both values.

    Raises:
        RuntimeError: conversion to a narrower dtype, which would round offset and delta alike.
    """
    dtype = kwargs.get("dtype") or x.dtype
    if not dtype.is_floating_point:
        return BitCenteredTensor(func(x.offset, **kwargs), func(x.value, **kwargs), x.context)
    if dtype not in (torch.float32, torch.float64):
        raise RuntimeError(
            f"a bit-centered tensor cannot be converted to {dtype} (by .half(), .bfloat16(), "
            "autocast, …): that would round its offset; its deltas are in "
            f"{x.context.precision.format} already. Use halp.to_plain(model) first, or stay in "
            "float32 or float64"
        )
    if not x.dtype.is_floating_point:
        offset = func(x.offset, **kwargs)
        return BitCenteredTensor(offset, func(x.delta, **kwargs) - offset, x.context)
    result = BitCenteredTensor(func(x.offset, **kwargs), func(x.delta, **kwargs), x.context)
    if x.decision is not None:
        result.decision = x.decision.to(result.device)
    return result


@register_handler(
    aten.max.dim, aten.min.dim, aten.sort.default, aten.sort.stable, aten.topk.default
)
def pick(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> tuple:
    """Operations that pick elements by value: the offset and the full value choose each."""
    dim, keeps_dim = _dim_and_keep(func, args, kwargs)
    before, after = (func(part, *args[1:], **kwargs)[1] for part in (x.offset, x.value))
    indices = BitCenteredTensor(before, after, x.context)
    if x.context.is_cached:  # before it is an operand itself
        assert x.context.cache is not None
        indices._offset.name(x.context.cache.key_of_result(1))
    if keeps_dim:
        return x.gather(dim, indices), indices
    return x.gather(dim, indices.unsqueeze(dim)).squeeze(dim), indices


def _dim_and_keep(func: OpOverload, args: tuple, kwargs: dict) -> tuple[int, bool]:
    """Return the dimension that is picked along, and whether the result still has it."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.get("dim", -1), "keepdim" not in names or given.get("keepdim", False)


@register_handler(aten.copy_.default)
def copy_into(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> Tensor:
    """``target.copy_(source)``: a plain source becomes the offset, with a delta of zero.

    Raises:
        RuntimeError: ``target`` is a plain tensor, which cannot hold a delta.
    """
    target, source = args[:2]
    if type(target) is not BitCenteredTensor:
        raise RuntimeError(
            "copying a bit-centered tensor into a plain one would lose its delta; copy "
            "halp.value(source), which is offset + delta"
        )
    assign(target, source)
    return target


@register_handler(
    aten.empty_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.zeros_like.default,
)
def create(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> BitCenteredTensor:
    """Create a tensor like a bit-centered one: a new offset with a delta of zero."""
    dtype = kwargs.get("dtype") or x.dtype
    if not dtype.is_floating_point:
        offset = func(x.delta, *args[1:], **{**kwargs, "dtype": dtype})
        return BitCenteredTensor(offset, offset.clone(), x.context)

    def created(like: Tensor) -> Tensor:
        return func(like, *args[1:], **kwargs)

    if x.context.is_cached:
        return kept_constant(x, created, dtype, drawn="rand" in func._schema.name)
    offset = created(x.offset)
    delta_dtype = x.delta.dtype if x.dtype.is_floating_point else offset.dtype
    return BitCenteredTensor.constant(offset, x.context, delta_dtype)


@register_handler(aten.bernoulli_.float, aten.normal_.default, aten.uniform_.default)
def randomize(
    func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict
) -> BitCenteredTensor:
    """Fill with random values, drawn once for both parts: they become the offset."""
    cache = x.context.cache
    if not x.context.is_cached or x._offset.root.is_at_hand:
        assign(x, func(torch.empty_like(x.offset), *args[1:], **kwargs))
        return x
    assert cache is not None
    if cache.recording:
        x._offset.computed.copy_(func(torch.empty_like(x._offset.computed), *args[1:], **kwargs))
    x._offset.root.written(cache.draw(x._offset.key), None)
    return x


@register_handler(aten.bernoulli.p)
def bernoulli(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> Tensor:
    """The out-of-place form, which compiled code uses for dropout."""

    def created(like: Tensor) -> Tensor:
        return func(like, *args[1:], **kwargs)

    if x.context.is_cached:
        return kept_constant(x, created, x.dtype, drawn=True)
    offset = created(x.offset)
    return BitCenteredTensor.constant(offset, x.context, x.delta.dtype)


@register_handler(aten._local_scalar_dense.default, aten.item.default)
def item(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> float | int | bool:
    """``t.item()`` is offset + delta."""
    return x.value.item()


@register_handler(aten.equal.default)
def equal(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> bool:
    """``torch.equal`` compares full values."""
    return call(func, args, kwargs, lambda x: x.value if type(x) is BitCenteredTensor else x)


@register_handler(
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten._foreach_norm.Scalar,
)
def refuse_norm(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> Any:
    """Refuse what ``clip_grad_norm_`` would measure.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "the norm of a bit-centered tensor has no delta rule. Of gradients: clip_grad_norm_ would "
        "clip the delta alone, so give BitCenterSVRG(..., max_norm=...), which clips the "
        "variance-reduced gradient. Of activations: write t.square().sum().sqrt()"
    )
