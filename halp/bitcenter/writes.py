"""Writing to bit-centered tensors: what an in-place operation computes goes into both parts."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from halp.bitcenter.tensor import BitCenteredTensor, writes_counted


def writes(func: OpOverload) -> bool:
    """Whether an operation changes values, not only the shape that they are seen in."""
    return func._schema.is_mutable and torch.Tag.inplace_view not in func.tags


def target_of(args: tuple, kwargs: dict) -> Any:
    """Return what an operation that writes is to write to."""
    return kwargs["out"] if "out" in kwargs else args[0]


def is_at_hand(x: Any) -> bool:
    """Whether this is a bit-centered parameter, or part of one: its offset is there to write to."""
    return type(x) is BitCenteredTensor and x._offset.root.is_at_hand


@cache
def _out_of_place(func: OpOverload) -> OpOverload | None:
    """Return the operation that computes what one in place, or with ``out``, writes.

    Overloads may be named differently (``pow_.Scalar``, ``pow.Tensor_Scalar``): arguments decide.
    """
    name = func._schema.name.removeprefix("aten::")
    if not _has_out(func):
        if not name.endswith("_"):
            return None
        name = name.removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else packet.overloads()
    for overload in sorted(overloads, key=lambda overload: overload != func._overloadname):
        candidate = getattr(packet, overload)
        if not _has_out(candidate) and _argument_types(candidate) == _argument_types(func):
            return candidate
    return None


def _has_out(func: OpOverload) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)


def _argument_types(func: OpOverload) -> list[str]:
    return [str(argument.type) for argument in func._schema.arguments if not argument.is_out]


def in_place(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Run the out-of-place operation and copy its result into both parts of the target.

    Raises:
        NotImplementedError: there is no such operation, or the target has another shape.
        RuntimeError: the target is a plain tensor.
    """
    functional = _out_of_place(func)
    if functional is None or len(func._schema.returns) > 1:
        raise NotImplementedError(f"{func} cannot write bit-centered tensors; use its plain form")
    target = target_of(args, kwargs)
    if type(target) is not BitCenteredTensor:
        raise RuntimeError(
            f"{func} would write a bit-centered value into a plain tensor, which would lose its "
            "delta; use the out-of-place operation, or halp.value(t) for the plain value"
        )
    result = functional(*args, **{name: v for name, v in kwargs.items() if name != "out"})
    if result.shape != target.shape:
        raise NotImplementedError(
            f"{func} would resize a bit-centered tensor of shape {tuple(target.shape)} to "
            f"{tuple(result.shape)}; use its plain form"
        )
    assign(target, result)
    return target


def assign(target: BitCenteredTensor, source: Tensor) -> None:
    """Copy both parts of ``source`` into ``target``; a plain source becomes the offset."""
    target.context.settle()
    with writes_counted():
        _assign_offset(target, source)
        _assign_delta(target, source)


def _assign_offset(target: BitCenteredTensor, source: Tensor) -> None:
    centered = source if isinstance(source, BitCenteredTensor) else None
    if not target.context.is_cached or is_at_hand(target):
        target.offset.copy_(source if centered is None else centered.offset)
        return
    cache, root = target.context.cache, target._offset.root
    assert cache is not None
    if cache.recording:
        target._offset.computed.copy_(source if centered is None else centered._offset.computed)
    if centered is not None and root is target._offset and source.shape == target.shape:
        root.written(centered._offset.key, centered._offset.frozen())
    else:
        root.written(hash(("written", target._offset.key, cache.key_of(source))), None)


def _assign_delta(target: BitCenteredTensor, source: Tensor) -> None:
    centered = source if isinstance(source, BitCenteredTensor) else None
    target.decision = None if centered is None else centered.decision
    if target._offset.is_recorded and 0 in target.delta.stride():
        return  # a stand-in for zeros
    if centered is not None:
        if not (centered.is_constant and target.is_constant):
            target.delta.copy_(centered.delta)
    elif not target.dtype.is_floating_point:
        target.delta.copy_(source)
    elif not target.is_constant:
        target.delta.zero_()
