"""What a low-precision computation rounds to, and the sequence of its roundings."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

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


class _Memory:
    """What is known of the tensors in one piece of memory, by place, size and dtypes."""

    __slots__ = ("copies", "storage")

    def __init__(self, storage: StorageWeakRef) -> None:
        self.storage = storage
        #: A version of the memory, and the copy; None where the values lie on the grid themselves.
        self.copies: dict[tuple, tuple[tuple[int, int], Tensor | None]] = {}


class RoundedCopies:
    """Rounded copies of plain tensors, each remembered while its memory lives unchanged.

    A step reads its inputs and parameters several times, also transposed: what is remembered is
    the memory that they occupy. Each is rounded once, then, also where rounding is random.
    """

    def __init__(self, rounder: Rounder) -> None:
        self._rounder = rounder
        self._memories: dict[int, _Memory] = {}

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return floating-point ``x`` on the grid, stored in ``dtype``."""
        if is_traced(x) or x.is_inference():
            return self._round(x, dtype)
        if x.is_contiguous():
            return self._rounded(x, x, dtype)
        if x.dim() == 2 and x.t().is_contiguous():
            return self._rounded(x.t(), x, dtype).t()
        return self._round(x, dtype)

    def _rounded(self, x: Tensor, versioned: Tensor, dtype: torch.dtype) -> Tensor:
        version = (versioned._version, self._rounder.generation)
        copies = self._memory(x).copies
        key = (x.storage_offset(), x.numel(), x.dtype, dtype)
        known_version, copy = copies.get(key, (None, None))
        if known_version != version:
            copy = self._round(x, dtype)
            copies[key] = (version, copy)
        return x if copy is None else copy.view(x.shape)

    def remember(self, x: Tensor) -> None:
        """Note that ``x`` lies on the grid already."""
        if not (is_traced(x) or x.is_inference()) and x.is_contiguous():
            key = (x.storage_offset(), x.numel(), x.dtype, x.dtype)
            self._memory(x).copies[key] = ((x._version, self._rounder.generation), None)

    def forget(self, x: Tensor | None = None) -> None:
        """Forget what shares memory with ``x``, which was written to; or everything."""
        if x is None:
            self._memories.clear()
        else:
            self._memories.pop(x.untyped_storage()._cdata, None)

    def _memory(self, x: Tensor) -> _Memory:
        storage = x.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None or memory.storage.expired():
            if len(self._memories) >= 256:
                alive = {k: m for k, m in self._memories.items() if not m.storage.expired()}
                self._memories = alive
            memory = self._memories[storage._cdata] = _Memory(StorageWeakRef(storage))
        return memory

    def _round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._rounder(as_wide(x)).to(dtype)


def as_wide(x: Tensor) -> Tensor:
    """Return ``x`` in a dtype that values can be rounded in: float32 unless it is float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
