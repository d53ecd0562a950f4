"""Calling an operation with the tensors among its arguments replaced."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class _OwnArithmetic(threading.local):
    """Whether this thread is inside an operation of halp's own, which no emulation rounds."""

    is_running = False


own_arithmetic = _OwnArithmetic()


def not_emulated() -> AbstractContextManager[None]:
    """Return a block in which :func:`halp.emulate` leaves operations alone: they are halp's own."""
    if torch.compiler.is_dynamo_compiling():  # which sees no emulation, and cannot trace the block
        return nullcontext()
    return _not_emulated()


@contextmanager
def _not_emulated() -> Iterator[None]:
    before, own_arithmetic.is_running = own_arithmetic.is_running, True
    try:
        yield
    finally:
        own_arithmetic.is_running = before


def replace_tensors(values: Iterable[Any], replace: Callable[[Tensor], Any]) -> list:
    """Return arguments with every tensor replaced, also inside lists."""
    return [
        replace(value)
        if isinstance(value, Tensor)
        else replace_tensors(value, replace)
        if type(value) is list or type(value) is tuple
        else value
        for value in values
    ]


def call(
    func: Callable, args: tuple, kwargs: dict[str, Any], replace: Callable[[Tensor], Any]
) -> Any:
    """Call ``func`` with every tensor among its arguments replaced."""
    if kwargs:
        kwargs = dict(zip(kwargs, replace_tensors(kwargs.values(), replace), strict=True))
    return func(*replace_tensors(args, replace), **kwargs)
