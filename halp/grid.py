"""Rounding to the values of one format, exactly: a few passes of plain arithmetic.

A rounded tensor keeps its wide dtype (its *carrier*): its values lie on the format's grid. There is
no dtype round trip anywhere, since compilers remove those. Of the ways to write a step, those are
taken that PyTorch vectorizes on a CPU: comparisons that give floats, never booleans or ``where``.
"""

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from halp.formats import FixedFormat, FloatFormat
from halp.random_bits import is_traced, row_length

#: Rounding modes; "near" is to nearest with ties to even, "void" no rounding at all.
ROUNDINGS = ("near", "near-away", "stoc", "zero", "up", "down", "void")
#: Those that know no signs.
_BY_MAGNITUDE = ("near-away", "stoc", "zero")
#: What becomes of values beyond the format's range.
OVERFLOWS = ("saturate", "inf")


class Carrier(NamedTuple):
    """Layout of the IEEE format that holds the values while they are rounded."""

    dtype: torch.dtype
    integer: torch.dtype
    exponent_bits: int
    fraction_bits: int
    #: Random bits behind one stochastic decision.
    random_bits: int

    @property
    def sign_mask(self) -> int:
        """The sign bit, as a signed integer."""
        return -1 << (self.exponent_bits + self.fraction_bits)

    @property
    def exponent_mask(self) -> int:
        """The bits of the exponent, all set in infinity and NaN."""
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field."""
        return (1 << (self.exponent_bits - 1)) - 1


CARRIERS = {
    torch.float32: Carrier(torch.float32, torch.int32, 8, 23, random_bits=23),
    torch.float64: Carrier(torch.float64, torch.int64, 11, 52, random_bits=32),
}


class RandomBits(NamedTuple):
    """What decides stochastic steps: of each element's 32-bit word the top ``bits`` bits."""

    #: int32, of the shape of what is rounded; rounding uses their memory up.
    words: Tensor
    bits: int

    def top(self, bits: int, dtype: torch.dtype) -> Tensor:
        """Return the top bits of each word as an integer, at most ``bits``."""
        return (self.words >> (32 - bits)).to(dtype).bitwise_and_((1 << bits) - 1)

    def midpoints(self, dtype: torch.dtype) -> Tensor:
        """Return ``(R + 1/2) / 2^bits`` for the top bits R of each word."""
        number = self.words.bitwise_right_shift_(32 - self.bits)
        if self.bits < 32:
            number = number.bitwise_and_((1 << self.bits) - 1).to(dtype)
        else:
            number = number.to(dtype).remainder_(2.0**32)
        return number.add_(0.5).mul_(2.0**-self.bits)


class Rounding(NamedTuple):
    """How to round: one of ROUNDINGS but "void", and what goes with it."""

    mode: str = "near"
    overflow: str = "saturate"
    #: False turns subnormal results into zeros.
    subnormals: bool = True
    #: Of "stoc".
    bits: RandomBits | None = None


class Grid(NamedTuple):
    """The values of a format times a power of two, and how to find them in a carrier."""

    carrier: Carrier
    fraction_bits: int
    #: Between them the spacing is that of each value's binade; outside it is constant.
    smallest_normal: float
    top_binade: float
    #: Their bit patterns, and what is subtracted from a binade's pattern to give its spacing's.
    low: int
    high: int
    step: int
    #: Largest magnitude, and the range as far as the result's dtype can hold it.
    max: float
    lowest: float
    highest: float
    #: What overflow becomes that does not saturate; None where it always does.
    beyond: float | None
    has_negative_zero: bool
    #: Whether the exponent range is the carrier's: dropping bits is all there is to do.
    drops_bits: bool

    @property
    def is_uniform(self) -> bool:
        """Whether all values have the same spacing."""
        return self.smallest_normal == self.top_binade


def _make_grid(
    format: FloatFormat | FixedFormat, dtype: torch.dtype, result: torch.dtype, exponent: int
) -> Grid:
    carrier, scale = CARRIERS[dtype], 2.0**exponent
    is_float = isinstance(format, FloatFormat)
    fraction_bits = format.fraction_bits if is_float else 0
    largest = _largest_held(format, result, scale)
    normal, top = format.smallest_normal * scale, 2.0**format.max_exponent * scale
    return Grid(
        carrier=carrier,
        fraction_bits=fraction_bits,
        smallest_normal=normal,
        top_binade=top if is_float else normal,
        low=(math.frexp(normal)[1] - 1 + carrier.bias) << carrier.fraction_bits,
        high=(math.frexp(top)[1] - 1 + carrier.bias) << carrier.fraction_bits,
        step=fraction_bits << carrier.fraction_bits,
        max=format.max * scale,
        lowest=-min(_held_below(-format.min * scale, result), largest),
        highest=min(_held_below(format.max * scale, result), largest),
        beyond=torch.inf if format.has_infinity else torch.nan if format.has_nan else None,
        has_negative_zero=format.has_negative_zero,
        drops_bits=_has_range_of(format, carrier) and exponent == 0,
    )


def _largest_held(format: FloatFormat | FixedFormat, dtype: torch.dtype, scale: float) -> float:
    """Return the largest number of ``dtype`` that is a value of the scaled format but for range."""
    held = torch.finfo(dtype)
    if isinstance(format, FixedFormat):
        step = format.smallest_normal * scale
        return held.max // step * step
    if held.eps >= 2.0**-format.fraction_bits:
        return held.max
    return (2 - 2.0**-format.fraction_bits) * 2.0 ** (math.frexp(held.max)[1] - 1)


def _held_below(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of ``dtype`` up to ``value``."""
    if value > torch.finfo(dtype).max:
        return torch.finfo(dtype).max
    fraction, exponent = math.frexp(value)
    digits = 2 / torch.finfo(dtype).eps
    return math.ldexp(math.floor(fraction * digits) / digits, exponent)


def _grid_if_it_fits(
    format: FloatFormat | FixedFormat, dtype: torch.dtype, result: torch.dtype, exponent: int
) -> Grid | None:
    carrier = CARRIERS[dtype]
    spacing = format.smallest_normal * 2.0**-format.fraction_bits
    finest, coarsest = math.frexp(spacing)[1] - 1 + exponent, format.max_exponent + exponent
    if _has_range_of(format, carrier) and exponent == 0:
        finest = 1 - carrier.bias
    if finest < 1 - carrier.bias or coarsest > carrier.bias:
        return None
    return _make_grid(format, dtype, result, exponent)


_cached_grid = lru_cache(maxsize=4096)(_grid_if_it_fits)


def make_grid(
    format: FloatFormat | FixedFormat, dtype: torch.dtype, result: torch.dtype, exponent: int = 0
) -> Grid | None:
    """Return the grid ``2^exponent · format`` for rounding in ``dtype``, stored as ``result``.

    None where ``dtype`` has too few exponents for it.
    """
    if torch.compiler.is_dynamo_compiling():
        return _grid_if_it_fits(format, dtype, result, exponent)
    return _cached_grid(format, dtype, result, exponent)


def _has_range_of(format: FloatFormat | FixedFormat, carrier: Carrier) -> bool:
    return (
        isinstance(format, FloatFormat)
        and format.has_infinity
        and (format.exponent_bits, format.bias) == (carrier.exponent_bits, carrier.bias)
    )


def round_on_grid(x: Tensor, grid: Grid, how: Rounding, fits: bool = False) -> Tensor:
    """Return ``x``, of the grid's carrier dtype, rounded to a value of the grid.

    ``fits`` says that nothing in ``x`` lies beyond the range.

    The spacing of the values around each element is a power of two, so that dividing by it and
    multiplying by it again is exact: what is rounded in between is an integer.
    """
    if how.bits is not None and is_traced(x) and x.is_contiguous():
        length = row_length(x.numel())
        if x.dim() != 2 and x.numel() % length == 0:  # a compiler sees the rows of the random bits
            rows = RandomBits(how.bits.words.view(-1, length), how.bits.bits)
            how = how._replace(bits=rows)
            return round_on_grid(x.view(-1, length), grid, how).view(x.shape)
    if grid.drops_bits:
        return _drop_bits(x, grid, how)
    threshold: float | Tensor = 0.5
    if how.bits is not None:
        threshold = how.bits.midpoints(x.dtype)
    spacing = grid.smallest_normal if grid.is_uniform else _spacing(x, grid, how.bits)
    steps = _round_to_integer(x / spacing, x, grid, how.mode, threshold)
    if not how.subnormals:
        steps.mul_(steps.abs().ge_(2.0**grid.fraction_bits))
    rounded = steps.mul_(spacing)
    if fits and how.mode == "near" and grid.has_negative_zero:
        return rounded
    saturates = how.overflow == "saturate" or grid.beyond is None
    if how.mode in _BY_MAGNITUDE:
        if saturates and grid.lowest == -grid.highest and grid.has_negative_zero:
            return _copy_sign(rounded.clamp_(max=grid.highest), x, grid)
        rounded = _copy_sign(rounded, x, grid)
    if saturates:
        rounded.clamp_(grid.lowest, grid.highest)
    else:
        rounded = _overflow(rounded, x, grid, how.mode)
    if grid.has_negative_zero:
        return rounded
    return rounded.add_(rounded - rounded if is_traced(x) else 0.0)  # compilers drop adding 0


def _spacing(x: Tensor, grid: Grid, used: RandomBits | None) -> Tensor:
    """Return the distance between the grid's values in each element's binade.

    Memory that was used already is in the processor's cache.
    """
    carrier = grid.carrier
    mask: int | Tensor = carrier.exponent_mask
    step: int | Tensor = grid.step
    traced = is_traced(x)
    if not traced:
        mask, step = _constants(grid.fraction_bits, x.dtype, x.device)
    pattern = x.view(carrier.integer)
    if used is not None and used.words.dtype == carrier.integer and not traced:
        binade = torch.bitwise_and(pattern, mask, out=used.words)
    else:
        binade = pattern & mask
    # In integers: clamping floats takes longer, for the sake of NaN.
    return binade.clamp_(grid.low, grid.high).sub_(step).view(x.dtype)


@cache
def _constants(fraction_bits: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return the exponent mask, and the step, as tensors: eager operations take these faster."""
    carrier = CARRIERS[dtype]
    numbers = (carrier.exponent_mask, fraction_bits << carrier.fraction_bits)
    return tuple(torch.tensor(n, dtype=carrier.integer, device=device) for n in numbers)


def _round_to_integer(
    y: Tensor, x: Tensor, grid: Grid, mode: str, threshold: float | Tensor
) -> Tensor:
    """Round ``y``, which has the sign of ``x``, in place; in some modes, its magnitude only."""
    match mode:
        case "near":
            return y.round_()
        case "up":
            return keep_nonzero(y, x, 2.0**-30).ceil_()
        case "down":
            return keep_nonzero(y, x, 2.0**-30).floor_()
    y.abs_()
    if mode == "zero":
        return y.floor_()
    rest = y.frac()
    return y.floor_().add_(rest.ge_(threshold))


def _copy_sign(magnitude: Tensor, x: Tensor, grid: Grid) -> Tensor:
    integer = grid.carrier.integer
    sign = x.view(integer) & grid.carrier.sign_mask
    return magnitude.view(integer).bitwise_or_(sign).view(x.dtype)


def keep_nonzero(y: Tensor, x: Tensor, least: float) -> Tensor:
    """Return ``y``, made from ``x``, but at least so far from zero where ``x`` is not zero.

    Read from bits: with ``torch.set_flush_denormal`` a subnormal is equal to zero.
    """
    carrier = CARRIERS[x.dtype]
    magnitude = x.view(carrier.integer) & ~carrier.sign_mask
    floor = magnitude.clamp_(max=1).to(y.dtype).mul_(least)
    return torch.maximum(y.abs_(), floor).copysign_(x)


def _overflow(y: Tensor, x: Tensor, grid: Grid, mode: str) -> Tensor:
    """Replace what is beyond the range, as IEEE 754 does (section 7.4)."""
    low, high = grid.lowest, grid.highest
    stays = {"zero": (low, high), "down": (None, high), "up": (low, None)}
    if mode in stays:
        y = torch.where(x.isinf(), y, y.clamp(*stays[mode]))
    assert grid.beyond is not None
    return torch.where(y.abs() > grid.max, torch.full_like(y, grid.beyond).copysign_(y), y)


def _drop_bits(x: Tensor, grid: Grid, how: Rounding) -> Tensor:
    """Round by integer addition, for a format with the carrier's exponent range (bf16 in float32).

    Adding to the bit pattern carries from the fraction into the exponent, subnormals included.
    """
    carrier = grid.carrier
    pattern = x.view(carrier.integer)
    magnitude = pattern & ~carrier.sign_mask
    dropped = carrier.fraction_bits - grid.fraction_bits
    if dropped <= 0:
        rounded = magnitude.clone()
    else:
        below = (1 << dropped) - 1
        rounded = magnitude + _increment(pattern, dropped, carrier, how)
        rounded.bitwise_and_(~below)
    if not how.subnormals:
        rounded.mul_(rounded.clone().ge_(1 << carrier.fraction_bits))
    if how.overflow == "saturate":
        fraction, exponent = math.frexp(grid.highest)
        rounded.clamp_(
            max=((exponent - 1 + carrier.bias) << carrier.fraction_bits)
            + int((2 * fraction - 1) * 2**carrier.fraction_bits)
        )
    nan = magnitude.clone().gt_(carrier.exponent_mask).mul_(magnitude)
    return torch.maximum(rounded, nan).bitwise_or_(pattern & carrier.sign_mask).view(x.dtype)


def _increment(pattern: Tensor, dropped: int, carrier: Carrier, how: Rounding) -> Tensor | int:
    """Return what to add to a magnitude so that dropping its last bits rounds it."""
    below, half = (1 << dropped) - 1, 1 << (dropped - 1)
    match how.mode:
        case "near":
            return ((pattern >> dropped) & 1).add_(half - 1)
        case "near-away":
            return half
        case "zero":
            return 0
    sign = pattern >> (carrier.exponent_bits + carrier.fraction_bits)  # all ones or all zeros
    match how.mode:
        case "up":
            return ~sign & below
        case "down":
            return sign & below
    bits = how.bits
    assert bits is not None
    # What is dropped carries if it reaches (R + 1/2) / 2^bits of a step.
    if bits.bits >= dropped:
        return bits.top(dropped, carrier.integer) ^ below
    midpoints = ((bits.top(bits.bits, carrier.integer) << 1) + 1) << (dropped - bits.bits - 1)
    return (1 << dropped) - midpoints
