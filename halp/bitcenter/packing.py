"""Storing tensors whose values lie on a low-precision grid in the smallest dtype that holds them.

Unpacking gives the same bits back. Nothing is rounded here: the values are there already.
"""

import math
from functools import cache

import torch
from torch import Tensor

from halp.formats import FixedFormat, FloatFormat, Format
from halp.precision import Precision

#: Bits of the fraction, smallest positive and largest value; and whether there is a negative zero.
_FLOATS = {
    torch.float8_e4m3fn: (3, 2.0**-9, 448.0, True),
    torch.float8_e5m2: (2, 2.0**-16, 57344.0, True),
    torch.float8_e4m3fnuz: (3, 2.0**-10, 240.0, False),
    torch.float8_e5m2fnuz: (2, 2.0**-17, 57344.0, False),
    torch.float16: (10, 2.0**-24, 65504.0, True),
    torch.bfloat16: (7, 2.0**-133, torch.finfo(torch.bfloat16).max, True),
    torch.float32: (23, 2.0**-149, torch.finfo(torch.float32).max, True),
}
_INTEGERS = {torch.int8: 8, torch.int16: 16, torch.int32: 32}


@cache
def container(format: Format, signed_zeros: bool) -> torch.dtype:
    """Return the smallest dtype that holds every value of ``format`` exactly.

    Args:
        format: the format. Blocks are held without their scales, by the dtype with most exponents.
        signed_zeros: whether zeros must keep their signs, even if the format has none.
    """
    if isinstance(format, FixedFormat) and not signed_zeros:
        return next(dtype for dtype, bits in _INTEGERS.items() if bits >= format.bits)
    for dtype, (fraction_bits, smallest, largest, negative_zero) in _FLOATS.items():
        if signed_zeros and not negative_zero:
            continue
        if isinstance(format, FixedFormat):
            fits = fraction_bits + 1 >= format.bits - 1 and smallest <= 1 and -format.min <= largest
        elif isinstance(format, FloatFormat):
            fits = (
                fraction_bits >= format.fraction_bits
                and smallest <= format.smallest_subnormal
                and largest >= format.max
            )
        else:
            element = container(format.element, signed_zeros)
            fits = dtype is torch.bfloat16 and (
                element in _INTEGERS or _FLOATS[element][0] <= fraction_bits
            )
        if fits:
            return dtype
    return torch.float64


def pack(x: Tensor, precision: Precision, *, signed_zeros: bool = False) -> tuple[Tensor, float]:
    """Return a tensor on the precision's grid as codes, and the scale that belongs to them.

    ``x`` is float32 or float64. It stays as it is where codes would not give the same numbers back:
    with NaN in it, or blocks of numbers that are further apart than the container reaches.
    """
    format = precision.format
    own_scales = isinstance(precision.scale, Tensor) and precision.scale.numel() > 1
    if precision.rounding == "void" or own_scales or x.numel() == 0:
        return x, 1.0
    dtype = container(format, signed_zeros)
    if dtype.itemsize >= x.itemsize:
        return x, 1.0
    low, high = torch.aminmax(x)
    largest = max(-low.item(), high.item())
    if not largest < math.inf:
        return x, 1.0
    scale = _scale(largest, precision)
    if not 0 < scale < math.inf:
        return x, 1.0
    codes = x if scale == 1 else _wide_enough(x, scale) / scale
    if dtype in _INTEGERS:
        codes = codes.round()
    codes = codes.to(dtype)
    return (codes, scale) if torch.equal(unpack(codes, scale, x.dtype), x) else (x, 1.0)


def _scale(largest: float, precision: Precision) -> float:
    """Return a scale on whose grid the values lie.

    With ``"auto"`` a smaller power of two than the one that rounding used will do, since its grid
    holds all that it reaches of the coarser one.
    """
    format, scale = precision.format, precision.scale
    if isinstance(scale, Tensor):
        return scale.item()
    if isinstance(scale, int | float):
        return float(scale)
    if scale is None or largest == 0 or not isinstance(format, FloatFormat | FixedFormat):
        return 1.0
    fraction, exponent = math.frexp(largest)
    top_fraction, top_exponent = math.frexp(format.max)
    return math.ldexp(1.0, exponent - top_exponent + (fraction > top_fraction))


def unpack(codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the values of codes in ``dtype``."""
    if codes.dtype == dtype and scale == 1:
        return codes
    values = codes.to(dtype)
    return values if scale == 1 else (_wide_enough(values, scale) * scale).to(dtype)


def _wide_enough(x: Tensor, scale: float) -> Tensor:
    """Return ``x`` in a dtype that holds the scale."""
    held = torch.finfo(x.dtype)
    return x if held.smallest_normal <= scale <= held.max else x.double()


def with_signs(rounded: Tensor, x: Tensor) -> Tensor:
    """Return ``rounded`` with what underflowed as −0 unless ``x`` is positive, then as +0."""
    signs = torch.where(x > 0, 0.0, -0.0).to(rounded.dtype)
    return torch.where(rounded == 0, signs, rounded)


def from_signs(rounded: Tensor) -> Tensor:
    """Return the numbers of :func:`with_signs`, +0 as the smallest normal number."""
    bits = {4: torch.int32, 8: torch.int64}[rounded.itemsize]
    positive = rounded.view(bits) == 0
    return rounded + positive.to(rounded.dtype).mul_(torch.finfo(rounded.dtype).smallest_normal)
