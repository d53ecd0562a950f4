"""Running a rule where offsets are cached: recording what it reads, or replaying it.

While a snapshot records, offsets are computed and rules do not run, but on the first call of a
kind: what they read then is read of all others. In inner steps rules run, and offsets are not
computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from halp.bitcenter.cache import KeptOffset, Recipes
from halp.bitcenter.offsets import EXACT
from halp.bitcenter.operands import Decided, Read, all_constant, on_offsets, operands_of
from halp.bitcenter.tensor import BitCenteredTensor
from halp.calls import replace_tensors


def run_with_cache(
    rule: Callable,
    recipe: Callable | None,
    func: OpOverload,
    like: BitCenteredTensor,
    args: tuple,
    kwargs: dict,
) -> Any:
    """Run a rule where offsets are cached: in a snapshot the offsets alone, else the deltas."""
    context = like.context
    cache = context.cache
    assert cache is not None
    deltas, decision, offsets = None, None, None
    cache.key_of_result(0)  # by which the batch is recognized
    if cache.recording:
        offsets = on_offsets(func, args, kwargs, like.dtype)
        if not all_constant(args):
            deltas = _touch_what_is_read(rule, func, like, args, kwargs)
    elif not all_constant(args):
        new_args, new_kwargs, _ = operands_of(like, args, kwargs)
        deltas = rule(*new_args, **new_kwargs)
    if type(deltas) is Decided:
        deltas, decision = deltas
    count = len(func._schema.returns)
    several = count > 1
    if deltas is None or not several:
        deltas = (deltas,) * count if deltas is None else (deltas,)
    offsets = offsets if several and offsets is not None else (offsets,) * count
    recipes: Any = ({},) * count
    if recipe is not None:
        new_args, new_kwargs, _ = operands_of(like, args, kwargs, with_deltas=False)
        recipes = recipe(*new_args, **new_kwargs)
        recipes = recipes if type(recipes) is tuple else (recipes, *({},) * (count - 1))
    results = tuple(
        kept_result(like, cache.key_of_result(i), offsets[i], deltas[i], recipes[i])
        for i in range(count)
    )
    if decision is not None:
        results[0].decision = decision
    return results if several else results[0]


def kept_result(
    like: BitCenteredTensor,
    key: int,
    offset: Tensor | None,
    delta: Any,
    recipes: Recipes | None = None,
) -> Any:
    """Return one result of an operation where offsets are cached."""
    context = like.context
    cache = context.cache
    assert cache is not None
    layout = None
    if cache.recording:
        if offset is None:
            cache.keep_layout(key, None)
            return None
        if not offset.dtype.is_floating_point:
            cache.keep_layout(key, offset)
            cache.keep(key, EXACT, lambda: offset, like.delta.dtype)
            return offset
        if delta is None or not offset.is_contiguous():
            cache.keep_layout(key, offset)
    else:
        layout = cache.layout(key) if delta is not None else cache.layout_of_constant(key)
        if delta is None:
            if layout is None:
                return None
            if not layout.dtype.is_floating_point:
                return cache.fetch(key, EXACT, layout.dtype)
    delta_dtype = like.delta.dtype if like.dtype.is_floating_point else torch.get_default_dtype()
    kept = KeptOffset(context, offset, key=key, delta_dtype=delta_dtype, recipes=recipes)
    dtype = like.dtype
    if cache.recording:
        assert offset is not None
        zeros, constant = _nothing(offset, delta_dtype), delta is None
        dtype = offset.dtype
    elif delta is None:
        assert layout is not None
        zeros, constant = like.delta.new_zeros(()).to(delta_dtype), True
        zeros, dtype = zeros.expand(layout.shape), layout.dtype
    else:
        stride = None if layout is None else layout.stride
        zeros = _strided(context.rounder(delta).to(delta_dtype), stride)
        context.remember(zeros)
        constant = False
    result = BitCenteredTensor(kept, zeros, context, dtype)
    if constant:
        result._constant = (zeros, zeros._version)
    return result


def kept_constant(
    like: BitCenteredTensor,
    create: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    *,
    drawn: bool = False,
) -> BitCenteredTensor:
    """Return the operation's only result, a constant that may be written to, where it is cached.

    ``create`` makes it like a tensor; ``drawn`` says that it is random.
    """
    cache = like.context.cache
    assert cache is not None
    key = cache.key_of_result(0)
    if drawn:
        key = cache.draw(key)
    offset = create(like._offset.computed) if cache.recording else None
    if offset is not None:
        layout = offset
    else:  # a random tensor has the layout of what it is made like
        layout = like.delta if drawn else create(like.delta)
    delta_dtype = like.delta.dtype if like.dtype.is_floating_point else dtype
    zeros = torch.zeros_like(layout, dtype=delta_dtype)
    kept = KeptOffset(like.context, offset, key=key, delta_dtype=delta_dtype)
    result = BitCenteredTensor(kept, zeros, like.context, dtype)
    result._constant = (zeros, zeros._version)
    return result


def _nothing(offset: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a delta of zeros that takes no memory, while a cache records."""
    return torch.zeros((), dtype=dtype, device=offset.device).expand(offset.shape)


def _strided(x: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """Return ``x`` with strides, by default those of a contiguous tensor."""
    if stride is None:
        return x.contiguous()
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def _touch_what_is_read(
    rule: Callable, func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict
) -> Any:
    """Have the cache keep what a rule reads; return its deltas, zeros, to tell which there are.

    The rule itself runs only on the first call of a kind.
    """
    cache = like.context.cache
    assert cache is not None
    kinds: list[Any] = [func, repr(replace_tensors((args, tuple(kwargs.items())), _nought))]
    replace_tensors((args, tuple(kwargs.values())), lambda x: kinds.append(_kind_of(x)))
    kind = tuple(kinds)
    new_args, new_kwargs, operands = operands_of(like, args, kwargs)
    if kind not in cache.plans:
        reads: list[Read] = []
        for operand in operands:
            operand._reads = reads
        cache.plans[kind] = _stand_ins(rule(*new_args, **new_kwargs)), reads
        return cache.plans[kind][0]
    deltas, reads = cache.plans[kind]
    for read in reads:
        operand = operands[read.number]
        if read.kept is None:
            assert operand._offset is not None
            operand._offset.touch(read.form, like.context, operand._dtype)
            continue
        name, compute, numbers, forms, (is_operand, of) = read.kept
        others = [operands[number] for number in numbers]
        of = operands[of] if is_operand else of
        for source in operand.sources(name, compute, *others, form=read.form, forms=forms, of=of):
            source.touch(like.context, operand._dtype)
    return deltas


def _stand_ins(deltas: Any) -> Any:
    """Return zeros that take no memory for every delta of a rule's result."""
    if deltas is None:
        return None
    if isinstance(deltas, tuple):
        parts = map(_stand_ins, deltas)
        return Decided(*parts) if type(deltas) is Decided else tuple(parts)
    return torch.zeros((), dtype=deltas.dtype, device=deltas.device).expand(deltas.shape)


def _nought(_: Tensor) -> int:
    return 0


def _kind_of(x: Tensor) -> tuple:
    constant = x.is_constant if isinstance(x, BitCenteredTensor) else None
    return tuple(x.shape), x.dtype, constant
