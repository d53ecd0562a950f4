"""Calling an operation with the tensors among its arguments replaced."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


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
