"""What a low-precision computation rounds to, and the sequence of its roundings."""

import weakref
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from halp import formats
from halp.formats import FloatFormat
from halp.random_bits import is_traced, stream_key
from halp.rounding import check_rounding, check_scale, round_to_format

Scale: TypeAlias = float | Tensor | str | None


@dataclass(frozen=True)
class Precision:
    """One number format with everything that decides how values are rounded to it.

    Raises:
        ValueError: an unknown format, rounding or overflow, or a scale that is not positive.
    """

    #: The number format; a name is looked up.
    format: FloatFormat
    #: "near" (ties to even), "stoc" or "void" (nothing is rounded).
    rounding: str = "near"
    #: None, a positive number or tensor, or "auto": see :func:`halp.quantize`.
    scale: Scale = None
    #: "saturate" or "inf".
    overflow: str = "saturate"
    #: Names the random bits of "stoc".
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", formats.get(self.format))
        check_rounding(self.rounding, self.overflow)
        check_scale(self.scale)
        if not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int, not {self.seed!r}")


class Rounder:
    """Rounds one tensor after another to a precision, each with random bits of its own.

    ``position`` counts the stochastic roundings done: setting it back repeats them bit for bit.
    ``generation`` counts what makes remembered copies stale, so that what a step draws does not
    depend on the steps before it.
    """

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.position = 0
        self.generation = 0

    def new_step(self) -> None:
        """Start a training step: rounded copies from earlier ones no longer count if random."""
        if self.precision.rounding == "stoc":
            self.generation += 1

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` (float32 or float64) on the grid; ``x`` itself where nothing is rounded."""
        precision = self.precision
        if precision.rounding == "void":
            return x
        key = None
        if precision.rounding == "stoc":
            if is_traced(x):
                raise NotImplementedError(
                    "stochastic rounding of a bit-centered or emulated model cannot be compiled "
                    "yet: every step would reuse the same random bits; use rounding='near', or run "
                    "it eagerly"
                )
            key = stream_key(precision.seed, self.position)
            self.position += 1
        return round_to_format(x, precision.format, precision.scale, precision.overflow, key)


class RoundedCopies:
    """Rounded copies of plain tensors, each remembered while its tensor lives unchanged.

    A step reads its inputs and parameters several times, also transposed: what is remembered is
    the memory they occupy.
    """

    def __init__(self, rounder: Rounder) -> None:
        self._rounder = rounder
        self._known: dict[tuple, tuple[weakref.ref[Tensor], tuple[int, int], Tensor]] = {}

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return floating-point ``x`` on the grid, stored in ``dtype``."""
        if is_traced(x) or x.is_inference():
            return self._round(x, dtype)
        if not x.is_contiguous():
            if x.dim() == 2 and x.t().is_contiguous():
                return self.rounded(x.t(), dtype).t()
            return self._round(x, dtype)
        known = self._known.get((x.data_ptr(), x.numel(), x.dtype, dtype))
        if known is not None and known[0]() is not None and known[1] == self._version(x):
            return known[2].view(x.shape)
        copy = self._round(x, dtype)
        self.remember(x, copy)
        return copy

    def remember(self, x: Tensor, copy: Tensor) -> None:
        """Note that the contiguous tensor ``x`` rounds to ``copy``, or to itself."""
        if is_traced(x) or x.is_inference() or not x.is_contiguous():
            return
        key = (x.data_ptr(), x.numel(), x.dtype, copy.dtype)
        owner = weakref.ref(self)

        def forget(_: object) -> None:
            copies = owner()
            if copies is not None:
                copies._known.pop(key, None)

        # A detached alias: remembering a result must not keep the tensor itself alive.
        copy = copy.detach() if copy is x else copy
        self._known[key] = (weakref.ref(x, forget), self._version(x), copy)

    def forget(self) -> None:
        """Forget every copy."""
        self._known.clear()

    def _version(self, x: Tensor) -> tuple[int, int]:
        return x._version, self._rounder.generation

    def _round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._rounder(as_wide(x)).to(dtype)


def as_wide(x: Tensor) -> Tensor:
    """Return ``x`` in a dtype that values can be rounded in: float32 unless it is float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
