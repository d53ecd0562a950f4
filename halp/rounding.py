"""Rounding to a number format: exact, pure PyTorch, safe to compile.

A rounded tensor keeps its wide dtype (its *carrier*): its values lie on the format's grid. There is
no dtype round trip anywhere, since compilers remove those.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from halp import formats
from halp.formats import FloatFormat
from halp.random_bits import Key, is_traced, random_bits, shared_constants, stream_key

#: Rounding modes: nearest with ties to even, stochastic, and no rounding at all.
ROUNDINGS = ("near", "stoc", "void")
#: What becomes of values beyond the format's range.
OVERFLOWS = ("saturate", "inf")


class _Carrier(NamedTuple):
    """Layout of the IEEE format that holds the values while they are rounded."""

    integer: torch.dtype
    exponent_bits: int
    fraction_bits: int
    #: Random bits behind one stochastic decision.
    random_bits: int

    @property
    def fraction_mask(self) -> int:
        return (1 << self.fraction_bits) - 1

    @property
    def exponent_mask(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1


_CARRIERS = {
    torch.float32: _Carrier(torch.int32, 8, 23, random_bits=23),
    torch.float64: _Carrier(torch.int64, 11, 52, random_bits=32),
}

#: Brings the largest values of a carrier to where rounding cannot overflow; a power of two.
_SHRINK = 2.0**-64


class _Constants(NamedTuple):
    """What rounding to one format in one carrier needs, computed once."""

    integer: torch.dtype
    #: Picks the exponent bits out of a value's bits.
    exponent_mask: int | Tensor
    #: binade · magic has exactly the format's spacing as its own unit in the last place.
    magic: float | Tensor
    #: From the power of two in binade · magic to the format's spacing.
    spacing: float | Tensor
    #: How many low bits of the carrier's fraction the format lacks; 0: it holds every value.
    dropped_bits: int
    #: The format's exponent range is the carrier's: dropping bits is all there is to do.
    same_range: bool
    max: float
    smallest_normal: float
    #: The format's largest significand, and the distance of its extreme exponents.
    max_significand: float
    max_exponent: int
    exponent_range: int
    #: Smallest normal carrier value; the largest binade whose product with ``magic`` is finite.
    tiny: float
    largest_binade: float
    #: Exponent of the carrier's largest binade.
    carrier_exponent: int
    random_bits: int


def _constants(format: FloatFormat, dtype: torch.dtype, device: torch.device | None) -> _Constants:
    """Return the constants as tensors of ``device``, or as numbers for traced code."""
    carrier = _CARRIERS[dtype]
    dropped = max(carrier.fraction_bits - format.fraction_bits, 0)
    mask: int | Tensor = carrier.exponent_mask
    magic: float | Tensor = 1.5 * 2.0**dropped
    spacing: float | Tensor = 2.0 ** -(format.fraction_bits + dropped)
    if device is not None:
        (mask,) = shared_constants((mask,), carrier.integer, device)
        magic, spacing = shared_constants((magic, spacing), dtype, device)
    return _Constants(
        integer=carrier.integer,
        exponent_mask=mask,
        magic=magic,
        spacing=spacing,
        dropped_bits=dropped,
        same_range=format.exponent_bits == carrier.exponent_bits,
        max=format.max,
        smallest_normal=format.smallest_normal,
        max_significand=format.max / 2.0**format.max_exponent,
        max_exponent=format.max_exponent,
        exponent_range=format.max_exponent - format.min_exponent,
        tiny=torch.finfo(dtype).tiny,
        largest_binade=2.0 ** (carrier.bias - dropped - 1),
        carrier_exponent=carrier.bias,
        random_bits=carrier.random_bits,
    )


_cached = cache(_constants)


def quantize(
    x: Tensor,
    format: str | FloatFormat,
    rounding: str = "near",
    *,
    scale: float | Tensor | str | None = None,
    overflow: str = "saturate",
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Round ``x`` to a number format: ``scale · Q(x / scale)``.

    Args:
        x: a floating tensor of any shape. float64 is rounded once, not through float32. The result
            is detached from the autograd graph.
        format: a name (``"fp16"``, ``"bf16"``, ``"fp8_e4m3"``, …) or a format.
        rounding: ``"near"`` (ties to even), ``"stoc"`` (up with the probability that makes the
            expected result ``x``, to 2⁻²⁴ of a grid step, subnormals included) or ``"void"`` (``x``
            itself).
        scale: ``None`` for the format's own range; a positive number or tensor that broadcasts
            against ``x``; ``"auto"`` for the smallest power of two with ``max|x| / scale`` within
            the format's range.
        overflow: ``"saturate"`` gives the largest finite value for everything beyond it, infinity
            included; ``"inf"`` gives infinity as IEEE 754 does (NaN in a format without infinity).
        generator: where ``"stoc"`` draws its seed from; by default PyTorch's global generator.
        seed: fixes the random bits of ``"stoc"`` altogether: an int, or a 0-dim int64 tensor.

    Returns:
        A new tensor of the shape and dtype of ``x``. NaN stays NaN and −0 stays −0.

    Raises:
        TypeError: ``x`` is not a floating tensor.
        ValueError: an unknown format, rounding or overflow, or a scale that is not positive.
    """
    format = formats.get(format)
    check_rounding(rounding, overflow)
    check_scale(scale)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"quantize takes a floating-point tensor, not {kind}; convert it first")
    if rounding == "void":
        return x.detach().clone()
    key = None
    if rounding == "stoc":
        if seed is None:
            seed = torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator)
        key = stream_key(seed)
    wide = x.detach() if x.dtype in _CARRIERS else x.detach().float()
    return round_to_format(wide, format, scale, overflow, key).to(x.dtype)


def check_rounding(rounding: str, overflow: str = "saturate") -> None:
    """Raise ValueError unless both are known."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; known: {', '.join(ROUNDINGS)}")
    if overflow not in OVERFLOWS:
        raise ValueError(f"unknown overflow {overflow!r}; known: {', '.join(OVERFLOWS)}")


def check_scale(scale: float | Tensor | str | None) -> None:
    """Raise ValueError unless ``scale`` is None, "auto", a tensor or a positive finite number."""
    if scale is None or isinstance(scale, Tensor) or scale == "auto":
        return
    if isinstance(scale, str) or not 0 < scale < float("inf"):
        raise ValueError(
            f'scale must be None, "auto", a positive number or a tensor, not {scale!r}'
        )


def round_to_format(
    x: Tensor,
    format: FloatFormat,
    scale: float | Tensor | str | None,
    overflow: str,
    key: Key | None,
) -> Tensor:
    """Round a float32 or float64 tensor: to nearest, or stochastically where there is a ``key``.

    What :func:`quantize` does, without its checks.
    """
    traced = is_traced(x)
    c = _constants(format, x.dtype, None) if traced else _cached(format, x.dtype, x.device)
    if isinstance(scale, str):
        return _round_to_own_scale(x, c, key, on_host=not traced and x.device.type == "cpu")
    if scale is not None:
        return round_to_format(x / scale, format, None, overflow, key).mul_(scale)
    if overflow == "saturate":
        return _round(x.clamp(-c.max, c.max), c, c.smallest_normal, key)
    rounded = _round(x, c, c.smallest_normal, key)
    beyond = torch.full_like(x, torch.inf if format.has_infinity else torch.nan).copysign_(x)
    return torch.where(rounded.abs() > c.max, beyond, rounded)


def _round_to_own_scale(x: Tensor, c: _Constants, key: Key | None, on_host: bool) -> Tensor:
    """Round with the smallest power of two s as scale for which ``max|x| ≤ s · max``.

    A power-of-two scale moves nothing but the exponent below which values are subnormal. Values so
    large that ``magic`` times them overflows the carrier are made smaller meanwhile, exactly.
    """
    if x.numel() == 0 or c.same_range:
        return _round(x, c, c.tiny, key)
    if on_host:  # reading the magnitude is cheaper than five 0-dim operations
        low, high = torch.aminmax(x)
        largest = max(-low.item(), high.item())
        if math.isnan(largest):
            largest = _without_nan(x).abs().max().item()
        normal = _scaled_normal(largest, c)
        if largest < c.largest_binade:
            return _round(x, c, normal, key)
        return _round(x * _SHRINK, c, max(normal * _SHRINK, c.tiny), key).div_(_SHRINK)
    magnitude = _without_nan(x).abs().max()
    shrink = torch.where(magnitude < c.largest_binade, 1.0, _SHRINK).to(x.dtype)
    normal_tensor = (_scaled_normal_of_tensor(magnitude, c) * shrink).clamp(min=c.tiny)
    return _round(x * shrink, c, normal_tensor, key) / shrink


def _without_nan(x: Tensor) -> Tensor:
    """Return ``x`` with zeros for NaN: one NaN must not make its neighbours subnormal."""
    return torch.nan_to_num(x, nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def _scaled_normal(largest: float, c: _Constants) -> float:
    """Return s · smallest_normal for a tensor with this largest magnitude."""
    if largest == 0:
        return c.tiny
    half_significand, exponent = math.frexp(largest)
    if not math.isfinite(largest):
        half_significand, exponent = 0.5, c.carrier_exponent + 2
    scale_exponent = exponent - 1 - c.max_exponent + (2 * half_significand > c.max_significand)
    return max(math.ldexp(c.smallest_normal, scale_exponent), c.tiny)


def _scaled_normal_of_tensor(largest: Tensor, c: _Constants) -> Tensor:
    """Do the same on the bits: a significand beyond the format's carries into the exponent."""
    carrier = _CARRIERS[largest.dtype]
    carry = carrier.fraction_mask - int((c.max_significand - 1) * 2**carrier.fraction_bits)
    shift = c.exponent_range << carrier.fraction_bits
    exponent = ((largest.view(c.integer) + carry) & carrier.exponent_mask) - shift
    return exponent.clamp(min=1 << carrier.fraction_bits).view(largest.dtype)


def _round(x: Tensor, c: _Constants, smallest_normal: float | Tensor, key: Key | None) -> Tensor:
    """Round ``x`` to the format's precision, with the given start of the subnormals.

    Adding and subtracting a number whose unit in the last place is the format's spacing rounds to
    nearest, ties to even. What that discarded is exact, and decides a stochastic step.
    """
    if c.same_range:
        return _drop_bits(x, c, key)
    binade = (x.view(c.integer) & c.exponent_mask).view(x.dtype)
    if isinstance(smallest_normal, Tensor):
        binade = torch.maximum(binade, smallest_normal).clamp_(max=c.largest_binade)
    else:
        binade = binade.clamp_(smallest_normal, c.largest_binade)
    magic = binade.mul_(c.magic)
    nearest = torch.add(x, magic).sub_(magic)
    if key is not None:
        discarded = x - nearest
        spacing = (magic.view(c.integer) & c.exponent_mask).view(x.dtype).mul_(c.spacing)
        moves = _uniform(x, key, c).mul_(spacing) < discarded.abs()
        nearest = nearest + spacing.copysign_(discarded).mul_(moves)
    return nearest.copysign_(x)


def _uniform(x: Tensor, key: Key, c: _Constants) -> Tensor:
    """Return values in (0, 1) of the shape and dtype of ``x``: midpoints of 2^random_bits steps."""
    bits = random_bits(x, key) >> (32 - c.random_bits)
    uniform = (bits.to(c.integer) & ((1 << c.random_bits) - 1)).to(x.dtype)
    return uniform.add_(0.5).mul_(2.0**-c.random_bits)


def _drop_bits(x: Tensor, c: _Constants, key: Key | None) -> Tensor:
    """Round by integer addition, for a format with the carrier's exponent range (bf16 in float32).

    Adding to the bit pattern carries from the fraction into the exponent, subnormals included.
    """
    if c.dropped_bits == 0:
        return x.clone()
    bits = x.view(c.integer)
    below = (1 << c.dropped_bits) - 1
    if key is None:
        increment = ((bits >> c.dropped_bits) & 1).add_(below >> 1)
    else:
        increment = random_bits(x, key) & below
    rounded = (bits + increment).bitwise_and_(~below).view(x.dtype)
    return torch.where(x.isfinite(), rounded, x)
