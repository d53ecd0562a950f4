"""Views and copies: the same operation on both parts, which never rounds."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import return_and_correct_aliasing

from halp.bitcenter.dispatch import assign, register_handler
from halp.bitcenter.offsets import Offset
from halp.bitcenter.tensor import BitCenteredTensor, writes_counted
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

    if is_traced(x.delta):
        result = BitCenteredTensor(see(x.offset), see(x.delta), x.context)
        return return_and_correct_aliasing(func, args, kwargs, result)
    base = x._offset
    with writes_counted():
        delta = see(x.delta)
        if not base.is_computed:
            offset = x.context.defer(lambda: see(base.tensor))
        else:
            offset = Offset(see(base.tensor), view=(base, see))
    return BitCenteredTensor(offset, delta, x.context, x.dtype)


#: In-place views, and the views that they are.
_IN_PLACE_VIEWS = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
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
    x._offset, x.delta, x._constant = seen._offset, seen.delta, None
    with no_dispatch():
        func(*args, **kwargs)
    return x


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
    """Several views at once."""
    with writes_counted():
        offsets = func(x.offset, *args[1:], **kwargs)
        deltas = func(x.delta, *args[1:], **kwargs)
    parts = zip(offsets, deltas, strict=True)
    return [BitCenteredTensor(offset, delta, x.context) for offset, delta in parts]


@register_handler(aten.clone.default, aten.contiguous.default, aten.lift_fresh.default)
def copy(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> BitCenteredTensor:
    """Copy both parts."""
    offset, delta = func(x.offset, *args[1:], **kwargs), func(x.delta, *args[1:], **kwargs)
    result = BitCenteredTensor(offset, delta, x.context)
    result.decision = x.decision
    return result


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
    return BitCenteredTensor(func(x.offset, **kwargs), func(x.delta, **kwargs), x.context)


@register_handler(
    aten.max.dim, aten.min.dim, aten.sort.default, aten.sort.stable, aten.topk.default
)
def pick(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> tuple:
    """Operations that pick elements by value: the offset and the full value choose each."""
    dim, keeps_dim = _dim_and_keep(func, args, kwargs)
    before, after = (func(part, *args[1:], **kwargs)[1] for part in (x.offset, x.value))
    indices = BitCenteredTensor(before, after, x.context)
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
    offset = func(x.offset, *args[1:], **kwargs)
    if not offset.dtype.is_floating_point:
        return BitCenteredTensor(offset, offset.clone(), x.context)
    delta_dtype = x.delta.dtype if x.dtype.is_floating_point else offset.dtype
    return BitCenteredTensor.constant(offset, x.context, delta_dtype)


@register_handler(aten.bernoulli_.float, aten.normal_.default, aten.uniform_.default)
def randomize(
    func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict
) -> BitCenteredTensor:
    """Fill with random values, drawn once for both parts: they become the offset."""
    assign(x, func(torch.empty_like(x.offset), *args[1:], **kwargs))
    return x


@register_handler(aten.bernoulli.p)
def bernoulli(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> Tensor:
    """The out-of-place form, which compiled code uses for dropout."""
    offset = func(x.offset, *args[1:], **kwargs)
    return BitCenteredTensor.constant(offset, x.context, x.delta.dtype)


@register_handler(aten._local_scalar_dense.default, aten.item.default)
def item(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> float | int | bool:
    """``t.item()`` is offset + delta."""
    return x.value.item()


@register_handler(aten.equal.default)
def equal(func: OpOverload, x: BitCenteredTensor, args: tuple, kwargs: dict) -> bool:
    """``torch.equal`` compares full values."""
    return call(func, args, kwargs, lambda x: x.value if type(x) is BitCenteredTensor else x)


@register_handler(aten.linalg_vector_norm.default, aten._foreach_norm.Scalar)
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
