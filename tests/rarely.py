"""Parameters whose tests are run at every commit, and those that are slow ones."""

from collections.abc import Iterable
from typing import Any

import pytest


def rarely_but(often: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Mark all parameters as slow but a few, in which all that can go wrong differs.

    Args:
        often: those of every commit.
        values: all of them; tuples stand for several parameters.
    """
    often, values = list(often), list(values)
    assert all(value in values for value in often)
    return [value if value in often else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
