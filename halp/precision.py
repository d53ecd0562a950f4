"""What a low-precision computation rounds to, and the sequence of its roundings."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halp import formats
from halp.fingerprints import checksum
from halp.formats import Format
from halp.grid import CARRIERS, RandomBits, Rounding
from halp.random_bits import Key, is_traced, random_bits, stream_key
from halp.recomputation import regions_under_way, repeat_in, repeats_every_operation
from halp.rounding import Scale, check_rounding, check_scale, in_range, round_to_format


@dataclass(frozen=True)
class Precision:
    """One number format with everything that decides how values are rounded to it.

    Raises:
        ValueError: an unknown format, rounding or overflow, or a scale that is not positive.
    """

    #: The number format; a name is looked up.
    format: Format
    #: One of :data:`halp.grid.ROUNDINGS`; see :func:`halp.quantize`.
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

    def __str__(self) -> str:
        """The format, and what is not the default."""
        defaults = {f.name: f.default for f in fields(self)}
        changed = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if name != "format" and (isinstance(value, Tensor) or value != defaults[name])
        ]
        return ", ".join([str(self.format), *changed])

    def round(self, x: Tensor, key: Key | None = None) -> Tensor:
        """Return ``x`` on the grid, "stoc" with the bits of a stream.

        Raises:
            TypeError: ``x`` is float16 or bfloat16, which does not hold the result.
        """
        if self.rounding == "void":
            return x
        if x.dtype not in CARRIERS:
            return held_in(self.round(as_wide(x), key), x.dtype, self)
        bits = None
        if key is not None:
            bits = RandomBits(random_bits(x, key), CARRIERS[x.dtype].random_bits)
        return round_to_format(
            x, self.format, Rounding(self.rounding, self.overflow, bits=bits), self.scale
        )

    def in_range(self, x: Tensor) -> Tensor:
        """Whether each element of ``x`` rounds to something within the format's range."""
        return in_range(x, self.format, self.scale)

    def nearest(self, x: Tensor) -> Tensor:
        """Return ``x`` on the grid, to nearest whatever the mode."""
        return x if self.rounding == "void" else replace(self, rounding="near").round(x)


class Rounder:
    """Rounds one tensor after another to a precision, each with random bits of its own.

    ``position`` counts the stochastic roundings done, and steps: setting it back repeats them bit
    for bit, as activation checkpointing does for what it recomputes. ``generation`` counts what
    makes remembered copies stale, so that what a step draws does not depend on steps before it.
    """

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.position = 0
        self.generation = 0
        #: Whether NaN or infinity came by; None where nobody asks.
        self.overflowed: bool | None = None
        #: The position that the step itself has taken: random bits of copies come from it.
        self._start = 0
        #: How to round where nothing random is needed.
        self._fixed = precision.rounding not in ("stoc", "void")
        self._how = Rounding(precision.rounding, precision.overflow)

    def new_step(self, *, keeps_copies: bool = False) -> None:
        """Start a training step: random copies from earlier ones no longer count."""
        if self.precision.rounding == "stoc":
            self._repeat_in_recomputation()
            self._start = self.position
            self.position += 1
            self.generation += not keeps_copies

    def __call__(self, x: Tensor, scale: float | None = None) -> Tensor:
        """Return ``x`` (float32 or float64) on the grid; ``x`` itself where nothing is rounded.

        ``scale`` takes the place of the precision's own.
        """
        if self.overflowed is False:
            self.overflowed = _overflows(x)
        precision = self.precision if scale is None else replace(self.precision, scale=scale)
        if x.dtype not in CARRIERS and precision.rounding != "void":
            return held_in(self(as_wide(x), scale), x.dtype, precision)
        if self._fixed:
            return round_to_format(x, precision.format, self._how, precision.scale)
        if precision.rounding != "stoc":
            return precision.round(x)
        _refuse_tracing(x)
        self._repeat_in_recomputation()
        key = stream_key(precision.seed, self.position)
        self.position += 1
        return precision.round(x, key)

    def copy(self, x: Tensor) -> Tensor:
        """Return ``x`` on the grid as an operand that may be read more than once in a step.

        Random bits are then those of its values, in memory's order: whoever reads the same values
        again in this step, also transposed, reads the same copy of them.
        """
        if self.precision.rounding != "stoc":
            return self(x)
        if self.overflowed is False:
            self.overflowed = _overflows(x)
        _refuse_tracing(x)
        self._repeat_in_recomputation()
        order = list(range(x.dim()))
        if self.precision.format.commutes_with_views:
            order.sort(key=lambda d: (x.stride(d), x.shape[d]), reverse=True)
        in_memory = x.permute(order)
        if not in_memory.is_contiguous():
            order, in_memory = list(range(x.dim())), x
        key = stream_key(self.precision.seed, self._start, checksum(in_memory))
        rounded = self.precision.round(in_memory, key)
        return rounded.permute([order.index(d) for d in range(x.dim())])

    def _repeat_in_recomputation(self) -> None:
        regions = regions_under_way()
        if not regions:
            return
        again = partial(self._again, self.position, self._start)
        if repeat_in(again, self, regions) and not repeats_every_operation(regions):
            raise NotImplementedError(
                "stochastic rounding of every operation cannot be repeated by this activation "
                "checkpointing, which recomputes by other operations than those that ran: use "
                "checkpoint(..., use_reentrant=False) without a selective context_fn, or round to "
                "nearest"
            )

    @contextmanager
    def _again(self, position: int, start: int) -> Iterator[None]:
        """Within the block, what was drawn from a position on is drawn once more."""
        now = self.position, self._start
        self.position, self._start = position, start
        try:
            yield
        finally:
            self.position, self._start = now


def _refuse_tracing(x: Tensor) -> None:
    if is_traced(x):
        raise NotImplementedError(
            "stochastic rounding of a bit-centered or emulated model cannot be compiled yet: every "
            "step would reuse the same random bits; use rounding='near', or run it eagerly"
        )


def _overflows(x: Tensor) -> bool:
    """Whether there is NaN or infinity in ``x``."""
    if x.numel() == 0 or is_traced(x):
        return False
    low, high = torch.aminmax(x)
    return not (-math.inf < low.item() and high.item() < math.inf)


class _Known(NamedTuple):
    """What is known of a tensor.

    Versions would miss what NumPy or a write through ``.data`` puts there: its bits are compared.
    """

    generation: int
    bits: Tensor
    #: The rounded copy; None where the values lie on the grid themselves.
    copy: Tensor | None

    def holds(self, x: Tensor, generation: int) -> bool:
        """Whether the memory of ``x`` holds what it held."""
        return generation == self.generation and torch.equal(self.bits, _bits_of(x))


def _bits_of(x: Tensor) -> Tensor:
    """Return contiguous memory as integers, which tell −0 from 0 and one NaN is equal to itself."""
    return x.detach().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


class _Memory:
    """What is known of the tensors in one piece of memory, by place, size and dtypes."""

    __slots__ = ("copies", "storage")

    def __init__(self, storage: StorageWeakRef) -> None:
        self.storage = storage
        self.copies: dict[tuple, _Known] = {}


class RoundedCopies:
    """Rounded copies of plain tensors, each remembered while its memory holds the same bits.

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
            return self._rounded(x, dtype)
        if x.dim() == 2 and x.t().is_contiguous() and self._commutes:
            return self._rounded(x.t(), dtype).t()
        return self._round(x, dtype)

    def _rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        copies, place = self._memory(x).copies, self._place(x, dtype)
        known = copies.get(place)
        if known is None or not known.holds(x, self._rounder.generation):
            copy = self._round(x, dtype)
            known = copies[place] = _Known(self._rounder.generation, _bits_of(x).clone(), copy)
        return x if known.copy is None else known.copy.view(x.shape)

    @property
    def _commutes(self) -> bool:
        return self._rounder.precision.format.commutes_with_views

    def _place(self, x: Tensor, dtype: torch.dtype) -> tuple:
        """Return what tells a tensor from others in its memory; blocks lie along its rows."""
        row = None if self._commutes or x.dim() == 0 else x.shape[-1]
        return (x.storage_offset(), x.numel(), row, x.dtype, dtype)

    def remember(self, x: Tensor) -> None:
        """Note that ``x`` lies on the grid already."""
        if not (is_traced(x) or x.is_inference()) and x.is_contiguous():
            known = _Known(self._rounder.generation, _bits_of(x).clone(), None)
            self._memory(x).copies[self._place(x, x.dtype)] = known

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
        copy = self._rounder.copy(as_wide(x))
        if dtype in CARRIERS:
            return copy.to(dtype)
        return held_in(copy, dtype, self._rounder.precision)


def held_in(x: Tensor, dtype: torch.dtype, precision: Precision) -> Tensor:
    """Return rounded values in a narrower dtype.

    Raises:
        TypeError: it does not hold them.
    """
    narrow = x.to(dtype)
    if not torch.equal(narrow.to(x.dtype).nan_to_num(), x.nan_to_num()):
        raise TypeError(
            f"{dtype} does not hold the values of {precision}: keep the model in torch.float32, in "
            "which low precision is emulated"
        )
    return narrow


def as_wide(x: Tensor) -> Tensor:
    """Return ``x`` in a dtype that values can be rounded in: float32 unless it is float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
