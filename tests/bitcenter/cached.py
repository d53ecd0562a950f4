"""Passes over models whose offsets are cached, as inner steps do them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

import halp
from halp.bitcenter.offsets import Context


def context_of(model: nn.Module) -> Context:
    """Return what the parameters of a bit-centered model share."""
    return next(model.parameters()).context


def record(model: nn.Module, batches: Iterable[Any], closure: Callable[..., Any]) -> None:
    """Have the offsets of batches recorded at w̃, as a snapshot does."""
    optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.1, T=10**9)
    optimizer.snapshot(list(batches), closure)
