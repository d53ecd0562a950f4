"""What a low-precision computation rounds to, and the sequence of its roundings."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halp import formats
from halp.calls import not_emulated
from halp.fingerprints import checksum
from halp.formats import Format
from halp.grid import CARRIERS, RandomBits, Rounding
from halp.memory import Content, in_memory, in_order
from halp.messages import quoted
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
            raise TypeError(f"seed must be an int, not {quoted(self.seed)}")

    def __str__(self) -> str:
        """The format, and what is not the default."""
        defaults = {f.name: f.default for f in fields(self)}
        changed = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if name != "format" and (isinstance(value, Tensor) or value != defaults[name])
        ]
        return ", ".join([str(self.format), *changed])

    @property
    def commutes_with_views(self) -> bool:
        """Whether rounding a view gives the view of what rounding the whole gives."""
        own_scales = isinstance(self.scale, Tensor) and self.scale.numel() > 1
        return self.format.is_elementwise and not own_scales

    def round(self, x: Tensor, key: Key | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return floating-point ``x`` on the grid, "stoc" with the bits of a stream.

        It is rounded once, in float32 or float64, and stored in ``dtype``: by default its own.
        """
        dtype = dtype or x.dtype
        if self.rounding == "void":
            return x.to(dtype)
        with not_emulated():
            wide, bits = as_wide(x), None
            if key is not None:
                bits = RandomBits(random_bits(wide, key), CARRIERS[wide.dtype].random_bits)
            how = Rounding(self.rounding, self.overflow, bits=bits)
            held = _narrower(wide.dtype, dtype)
            return round_to_format(wide, self.format, how, self.scale, held=held).to(dtype)

    def in_range(self, x: Tensor) -> Tensor:
        """Whether each element of ``x`` rounds to something within the format's range."""
        return in_range(as_wide(x), self.format, self.scale)

    def nearest(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``x`` on the grid, to nearest whatever the mode; see :meth:`round`."""
        if self.rounding == "void":
            return x.to(dtype or x.dtype)
        return replace(self, rounding="near").round(x, dtype=dtype)

    def is_held_by(self, dtype: torch.dtype) -> bool:
        """Whether float16 or bfloat16 can store what is rounded; wider dtypes always may."""
        if dtype in CARRIERS or self.rounding == "void":
            return True
        scale = 1.0 if self.scale is None else self.scale
        return _holds(dtype, self.format, scale if isinstance(scale, int | float) else None)


@cache
def _holds(dtype: torch.dtype, format: Format, scale: float | None) -> bool:
    """Whether ``dtype`` holds a format's values; where the scale varies, their digits."""
    values = torch.tensor(format.landmarks, dtype=torch.float64)
    values = torch.frexp(values)[0] if scale is None else values * scale
    return torch.equal(values.to(dtype).double(), values)


def _narrower(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the one of two dtypes that reaches less far."""
    if dtype == other:
        return dtype
    return min(dtype, other, key=lambda d: torch.finfo(d).max)


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

    def __call__(
        self, x: Tensor, scale: float | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return floating-point ``x`` on the grid; ``x`` itself where nothing is rounded.

        ``scale`` takes the place of the precision's own. The result is stored in ``dtype``, by
        default that of ``x``.
        """
        if self.overflowed is False:
            self.overflowed = _overflows(x)
        precision = self.precision if scale is None else replace(self.precision, scale=scale)
        if self._fixed and x.dtype in CARRIERS and dtype in (None, x.dtype):
            return round_to_format(x, precision.format, self._how, precision.scale)
        if precision.rounding != "stoc":
            return precision.round(x, dtype=dtype)
        _refuse_tracing(x)
        self._repeat_in_recomputation()
        key = stream_key(precision.seed, self.position)
        self.position += 1
        return precision.round(x, key, dtype)

    def copy(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``x`` on the grid as an operand that may be read more than once in a step.

        Random bits are then those of its values, in memory's order: whoever reads the same values
        again in this step, also transposed, reads the same copy of them.
        """
        if self.precision.rounding != "stoc":
            return self(x, dtype=dtype)
        if self.overflowed is False:
            self.overflowed = _overflows(x)
        _refuse_tracing(x)
        self._repeat_in_recomputation()
        source, order = in_memory(x) if self.precision.commutes_with_views else (x, None)
        key = stream_key(self.precision.seed, self._start, checksum(source))
        rounded = self.precision.round(source, key, dtype)
        return rounded if source is x else in_order(rounded, x, order)

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


class _Copy(NamedTuple):
    """A rounded copy, and what tells whether it still is one."""

    source: Content
    generation: int
    #: None where the values lie on the grid themselves.
    copy: Tensor | None


class _Memory:
    """What is known of the tensors in one piece of memory, by place, shape and dtypes."""

    __slots__ = ("copies", "storage")

    def __init__(self, storage: StorageWeakRef) -> None:
        self.storage = storage
        self.copies: dict[tuple, _Copy] = {}


class RoundedCopies:
    """Rounded copies of plain tensors, each remembered while its memory lives unchanged.

    A step reads its inputs and parameters several times, also transposed: what is remembered is
    the memory that they occupy. Each is rounded once, then, also where rounding is random. Where
    rounding does not commute with views (blocks), every view is rounded for itself, along its own
    last dimension. A copy counts only as long as the memory holds the bits that were rounded.
    """

    def __init__(self, rounder: Rounder) -> None:
        self._rounder = rounder
        self._by_memory = rounder.precision.commutes_with_views
        self._memories: dict[int, _Memory] = {}

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return floating-point ``x`` on the grid, stored in ``dtype``."""
        if is_traced(x) or self._rounder.precision.rounding == "void":
            return self._rounder.copy(x, dtype)
        source, order = self._source(x)
        copies, key = self._memory(x).copies, _key(source, dtype)
        known = copies.get(key)
        if (
            known is None
            or known.generation != self._rounder.generation
            or not known.source.is_in(source)
        ):
            copy = self._rounder.copy(source, dtype)
            known = copies[key] = _Copy(Content(source), self._rounder.generation, copy)
        if known.copy is None:
            return x
        return known.copy if source is x else in_order(known.copy, x, order)

    def remember(self, x: Tensor) -> None:
        """Note that ``x`` lies on the grid already."""
        if is_traced(x) or self._rounder.precision.rounding == "void":
            return
        source, _ = self._source(x)
        known = _Copy(Content(source), self._rounder.generation, None)
        self._memory(x).copies[_key(source, x.dtype)] = known

    def forget(self, x: Tensor | None = None) -> None:
        """Forget what shares memory with ``x``, which was written to; or everything."""
        if x is None:
            self._memories.clear()
        else:
            self._memories.pop(x.untyped_storage()._cdata, None)

    def _source(self, x: Tensor) -> tuple[Tensor, list[int] | None]:
        """Return what is rounded of ``x``: where rounding commutes with views, its memory."""
        return in_memory(x) if self._by_memory else (x, None)

    def _memory(self, x: Tensor) -> _Memory:
        storage = x.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None or memory.storage.expired():
            if len(self._memories) >= 256:
                alive = {k: m for k, m in self._memories.items() if not m.storage.expired()}
                self._memories = alive
            memory = self._memories[storage._cdata] = _Memory(StorageWeakRef(storage))
        return memory


def _key(x: Tensor, dtype: torch.dtype) -> tuple:
    """Return what tells a tensor from others of its memory, and the dtype of its copy."""
    return x.storage_offset(), x.shape, x.stride(), x.dtype, dtype


def as_wide(x: Tensor) -> Tensor:
    """Return ``x`` in a dtype that values can be rounded in: float32 unless it is float64."""
    return x if x.dtype in CARRIERS else x.float()
