"""What a low-precision computation rounds to, and the sequence of its roundings."""

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halp import formats
from halp.calls import not_emulated
from halp.formats import Format
from halp.grid import CARRIERS, RandomBits, Rounding
from halp.random_bits import Key, is_traced, random_bits, stream_key
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
        if is_traced(x):
            return self._rounded(x, key, dtype)
        with not_emulated():
            return self._rounded(x, key, dtype)

    def _rounded(self, x: Tensor, key: Key | None, dtype: torch.dtype) -> Tensor:
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

    ``position`` counts the stochastic roundings done: setting it back repeats them bit for bit.
    ``generation`` counts what makes remembered copies stale, so that what a step draws does not
    depend on the steps before it.
    """

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.position = 0
        self.generation = 0
        #: Whether NaN or infinity came by; None where nobody asks.
        self.overflowed: bool | None = None
        #: How to round where nothing random is needed.
        self._fixed = precision.rounding not in ("stoc", "void")
        self._how = Rounding(precision.rounding, precision.overflow)

    def new_step(self) -> None:
        """Start a training step: rounded copies from earlier ones no longer count if random."""
        if self.precision.rounding == "stoc":
            self.generation += 1

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
        return precision.round(x, key, dtype)


def _overflows(x: Tensor) -> bool:
    """Whether there is NaN or infinity in ``x``."""
    if x.numel() == 0 or is_traced(x):
        return False
    low, high = torch.aminmax(x)
    return not (-math.inf < low.item() and high.item() < math.inf)


class Content:
    """What a tensor holds: tells later whether it still does, however it was written to.

    A version counter knows nothing of what NumPy writes, or ``.data``.
    """

    __slots__ = ("_bits",)

    def __init__(self, x: Tensor) -> None:
        self._bits = _bits_of(x).clone()

    def is_in(self, x: Tensor) -> bool:
        """Whether ``x`` is a tensor of the same shape and the same bits: also of NaN and of −0."""
        bits = _bits_of(x)
        if bits.device.type == "cpu":  # vectorized, unlike torch.equal
            return numpy.array_equal(bits.numpy(), self._bits.numpy())
        return torch.equal(bits, self._bits)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits_of(x: Tensor) -> Tensor:
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.resolve_neg().view(_WORDS[x.itemsize])


class Unchanged:
    """Tells whether a tensor holds what it held when this was made.

    Args:
        x: the tensor.
        version: its version, if nobody outside has got hold of its memory: whatever writes to it
            counts in that then. By default the content is compared.
    """

    __slots__ = ("__weakref__", "_content", "_version")

    def __init__(self, x: Tensor, version: int | None = None) -> None:
        self._version = version
        self._content = Content(x) if version is None else None

    def holds(self, x: Tensor, version: int) -> bool:
        """Whether ``x``, of this version now, has not changed."""
        return self._version == version if self._content is None else self._content.is_in(x)

    def hand_out(self, x: Tensor) -> None:
        """Compare the content from now on: somebody is about to get hold of the memory."""
        if self._content is None:
            self._content = Content(x)


def version_of(x: Tensor) -> int:
    """Return how often PyTorch has noted a write to ``x``; inference tensors count none."""
    return 0 if x.is_inference() else x._version


class _Copy(NamedTuple):
    """A rounded copy, and what tells whether it still is one."""

    source: Unchanged
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
            return self._rounder(x, dtype=dtype)
        source, order = self._source(x)
        copies, key = self._memory(x).copies, _key(source, dtype)
        known = copies.get(key)
        if (
            known is None
            or known.generation != self._rounder.generation
            or not known.source.holds(source, version_of(x))
        ):
            copy = self._rounder(source, dtype=dtype)
            known = copies[key] = _Copy(Unchanged(source), self._rounder.generation, copy)
        if known.copy is None:
            return x
        return known.copy if source is x else _in_order(known.copy, x, order)

    def remember(self, x: Tensor, *, watched: bool = False) -> None:
        """Note that ``x`` lies on the grid already.

        ``watched`` says that every write to it will be told: see :meth:`forget`, :meth:`hand_out`.
        """
        if is_traced(x) or self._rounder.precision.rounding == "void":
            return
        source, _ = self._source(x)
        unchanged = Unchanged(source, version_of(x) if watched else None)
        copies = self._memory(x).copies
        copies[_key(source, x.dtype)] = _Copy(unchanged, self._rounder.generation, None)

    def hand_out(self, x: Tensor) -> None:
        """Note that somebody is about to get hold of the memory of ``x``, and may write to it."""
        storage = x.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is not None and not memory.storage.expired():
            for (place, shape, stride, dtype, _), known in memory.copies.items():
                whole = torch.empty(0, dtype=dtype, device=x.device)
                known.source.hand_out(whole.set_(storage, place, shape, stride))

    def forget(self, x: Tensor | None = None) -> None:
        """Forget what shares memory with ``x``, which was written to; or everything."""
        if x is None:
            self._memories.clear()
        else:
            self._memories.pop(x.untyped_storage()._cdata, None)

    def _source(self, x: Tensor) -> tuple[Tensor, list[int] | None]:
        """Return what is rounded of ``x``: where it can be, its memory as one row.

        And the order of its dimensions in memory, if that is another than theirs.
        """
        if not self._by_memory:
            return x, None
        if x.is_contiguous():
            return x.view(-1), None
        strides = x.stride()
        order = sorted(range(x.dim()), key=strides.__getitem__, reverse=True)
        ordered = x.permute(order)
        return (ordered.view(-1), order) if ordered.is_contiguous() else (x, None)

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


def _in_order(flat: Tensor, x: Tensor, order: list[int] | None) -> Tensor:
    """Return numbers in the order of memory in the shape of ``x``."""
    if order is None:
        return flat.view(x.shape)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([x.shape[i] for i in order]).permute(inverse)


def as_wide(x: Tensor) -> Tensor:
    """Return ``x`` in a dtype that values can be rounded in: float32 unless it is float64."""
    return x if x.dtype in CARRIERS else x.float()
