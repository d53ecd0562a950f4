"""Rounding to a number format: exact, pure PyTorch, safe to compile.

Scales and blocks, on top of :mod:`halp.grid`. Scales that are powers of two move exponents only.
"""

import math
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from halp import formats
from halp.calls import not_emulated
from halp.formats import BlockFormat, FixedFormat, FloatFormat, Format
from halp.grid import (
    CARRIERS,
    OVERFLOWS,
    ROUNDINGS,
    RandomBits,
    Rounding,
    keep_nonzero,
    make_grid,
    round_on_grid,
)
from halp.messages import quoted
from halp.random_bits import Key, is_traced, random_bits, stream_key

Scale: TypeAlias = float | Tensor | str | None

#: Integer dtypes in which random bits can be given: all bits of each element are used.
_WORDS = {torch.uint8: 8, torch.int16: 16, torch.int32: 32}


def quantize(
    x: Tensor,
    format: str | Format,
    rounding: str = "near",
    *,
    scale: Scale = None,
    overflow: str = "saturate",
    subnormals: bool = True,
    axis: int = -1,
    random_bits: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Round ``x`` to a number format: ``scale · Q(x / scale)``.

    Args:
        x: a floating tensor of any shape. float64 is rounded once, not through float32. The result
            is detached from the autograd graph (:class:`halp.Quantize` has gradients).
        format: a name (``"fp16"``, ``"fp8_e4m3"``, ``"e5m7"``, ``"fixed8"``, ``"mxfp4"``, …) or a
            format; ``python -m halp.formats`` lists them.
        rounding: ``"near"`` (to nearest, ties to even), ``"near-away"`` (ties away from zero),
            ``"stoc"`` (stochastic), ``"zero"``, ``"up"`` (toward +∞), ``"down"`` or ``"void"``
            (``x`` itself).
        scale: ``None`` for the format's own range; a positive number or tensor that broadcasts
            against ``x``; ``"auto"`` for the smallest power of two with ``max|x| / scale`` within
            the format's range, where infinities and NaN do not count. Formats of blocks, which
            scale by themselves, ignore ``"auto"``.
        overflow: ``"saturate"`` gives the largest finite value for everything beyond it, infinity
            included. ``"inf"`` gives infinity where IEEE 754 does: NaN in a format without
            infinity, and the largest value in one without NaN too. Elements of blocks saturate.
        subnormals: False turns results below the smallest normal into zero of their sign.
        axis: of the blocks.
        random_bits: of ``"stoc"``: how many bits k decide a step, 1 to 23 (to 32 in float64); or
            the bits themselves, an integer tensor (uint8, int16 or int32) of the shape of ``x``.
            With the remainder r of an element, in steps of the grid toward zero, it moves away
            from zero if ``(R + 1/2) / 2^k ≤ r``, R being its k random bits. By default k is 23 or
            32, so that the expected result is ``x`` to 2⁻²⁴ of a step, subnormals included.
        generator: where ``"stoc"`` draws its seed from; by default PyTorch's global generator.
        seed: fixes the random bits of ``"stoc"`` altogether: an int, or a 0-dim int64 tensor.

    Returns:
        A new tensor of the shape and dtype of ``x``: where that dtype does not reach as far as the
        format, results end with what both can hold. NaN stays NaN, and −0 stays −0 where the format
        has one.

    Raises:
        TypeError: ``x`` is not a floating tensor, or an argument is of the wrong kind.
        ValueError: an unknown format, rounding or overflow, a scale that is not positive, an axis
            that ``x`` does not have, bits that do not fit; or NaN in ``x`` and a format without.
            (In compiled code NaN and scales are not looked at: there NaN stays NaN.)
    """
    format = formats.get(format)
    check_rounding(rounding, overflow)
    check_scale(scale)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"quantize takes a floating-point tensor, not {kind}; convert it first")
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise TypeError(f"axis is an int, not {quoted(axis)}")
    if not -max(x.dim(), 1) <= axis < max(x.dim(), 1):
        raise ValueError(f"axis {quoted(axis)} is none of a tensor with {x.dim()} dimensions")
    _check_randomness(random_bits, seed)
    x = x.detach()
    if rounding == "void":
        return x.clone()
    with not_emulated():
        if not is_traced(x):
            _check_values(x, format, scale)
        wide = x if x.dtype in CARRIERS else x.float()
        bits = None
        if rounding == "stoc":
            if seed is None and not isinstance(random_bits, Tensor):
                seed = torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator)
            bits = _bits_for(wide, random_bits, None if seed is None else stream_key(seed))
        how = Rounding(rounding, overflow, subnormals, bits)
        return round_to_format(wide, format, how, scale, axis=axis, held=x.dtype).to(x.dtype)


def check_rounding(rounding: str, overflow: str = "saturate") -> None:
    """Raise ValueError unless both are known."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {quoted(rounding)}; known: {', '.join(ROUNDINGS)}")
    if overflow not in OVERFLOWS:
        raise ValueError(f"unknown overflow {quoted(overflow)}; known: {', '.join(OVERFLOWS)}")


def check_scale(scale: Scale) -> None:
    """Raise unless ``scale`` is None, "auto", a tensor or a positive finite number."""
    if scale is None or isinstance(scale, Tensor) or (isinstance(scale, str) and scale == "auto"):
        return
    wanted = 'scale must be None, "auto", a positive number or a tensor'
    if not isinstance(scale, int | float | str) or isinstance(scale, bool):
        raise TypeError(f"{wanted}, not {quoted(scale)}")
    if isinstance(scale, str) or not 0 < scale < float("inf"):
        raise ValueError(f"{wanted}, not {quoted(scale)}")


def _check_randomness(given: int | Tensor | None, seed: int | Tensor | None) -> None:
    if given is not None and (not isinstance(given, int | Tensor) or isinstance(given, bool)):
        raise TypeError(
            f"random_bits is a number of bits or an integer tensor, not {quoted(given)}"
        )
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0:
            raise TypeError(f"seed as a tensor is 0-dim int64, not {seed.dim()}-dim {seed.dtype}")
    elif seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TypeError(f"seed is an int or a 0-dim int64 tensor, not {quoted(seed)}")


def _check_values(x: Tensor, format: Format, scale: Scale) -> None:
    if not format.has_nan and x.numel() and torch.aminmax(x)[0].isnan():
        raise ValueError(f"the tensor holds NaN, and {format} has no NaN")
    if isinstance(scale, Tensor):
        wrong = scale[~((scale > 0) & scale.isfinite())]
        if len(wrong):
            raise ValueError(f"scale must be positive and finite, not {wrong[0].item()}")


def _bits_for(x: Tensor, given: int | Tensor | None, key: Key | None) -> RandomBits:
    """Return the random bits that ``quantize`` was asked for."""
    most = CARRIERS[x.dtype].random_bits
    if isinstance(given, Tensor):
        if given.dtype not in _WORDS or given.shape != x.shape:
            raise ValueError(
                "random_bits as a tensor is uint8, int16 or int32 and of the shape of x, "
                f"{tuple(x.shape)}, not {given.dtype} of shape {tuple(given.shape)}"
            )
        count = _WORDS[given.dtype]
        return RandomBits(given.to(torch.int32) << (32 - count), min(count, most))
    if given is None:
        given = most
    if not 1 <= given <= most:
        raise ValueError(f"random_bits must lie in 1 ... {most} for {x.dtype}, not {quoted(given)}")
    assert key is not None
    return RandomBits(random_bits(x, key), given)


def round_to_format(
    x: Tensor,
    format: Format,
    how: Rounding,
    scale: Scale = None,
    *,
    axis: int = -1,
    held: torch.dtype | None = None,
) -> Tensor:
    """Round a float32 or float64 tensor; what :func:`quantize` does, without its checks.

    NaN stays NaN here in every format: a run that has diverged shows it.

    Args:
        held: the dtype that the result will be stored in, whose range limits it.
    """
    held = held or x.dtype
    if scale is not None and not isinstance(scale, str):
        return _round_with_scale(x, format, how, scale, axis, held)
    if isinstance(format, BlockFormat):
        return _round_blocks(x, format, how, axis, held)
    if scale is None:
        return _round_unscaled(x, format, how, held)
    return _round_to_own_scale(x, format, how, held)


def _round_with_scale(
    x: Tensor, format: Format, how: Rounding, scale: float | Tensor, axis: int, held: torch.dtype
) -> Tensor:
    largest = torch.finfo(held).max
    reaches_further = isinstance(scale, Tensor) or format.max * scale > largest
    if isinstance(scale, Tensor):
        scale = scale.detach().to(x.dtype)
    scaled = _nonzero_if_directed(x / scale, x, how)
    rounded = round_to_format(scaled, format, how, axis=axis)
    if how.overflow == "saturate" and reaches_further and not isinstance(format, BlockFormat):
        ends = torch.tensor([-1, 1], dtype=x.dtype, device=x.device) * largest
        low, high = (end / scale for end in ends)
        rounded = _between(rounded, low, high, format)
    return rounded.mul_(scale)


def _round_unscaled(
    x: Tensor, format: FloatFormat | FixedFormat, how: Rounding, held: torch.dtype
) -> Tensor:
    grid = make_grid(format, x.dtype, held)
    if grid is None:  # it has more exponents than float32
        return _round_unscaled(x.double(), format, how, held).to(x.dtype)
    return round_on_grid(x, grid, how)


def _round_to_own_scale(
    x: Tensor, format: FloatFormat | FixedFormat, how: Rounding, held: torch.dtype
) -> Tensor:
    """Round with the smallest power of two s as scale for which ``max|x| ≤ s · max``.

    Where the scaled grid fits the dtype of ``x``, nothing but its limits moves.
    """
    if x.numel() == 0:
        return x.clone()
    exponent: Any
    if is_traced(x) or x.device.type != "cpu":
        exponent = _scale_exponent(_frexp(_largest_finite(x)), format)
    else:  # reading the magnitude is cheaper than a handful of 0-dim operations
        low, high = torch.aminmax(x)
        largest = max(-low.item(), high.item())
        fits = largest < math.inf
        if not fits:
            largest = _largest_finite(x).item()
        exponent = _scale_exponent(math.frexp(largest), format)
        grid = make_grid(format, x.dtype, held, exponent)
        if grid is not None:
            return round_on_grid(x, grid, how, fits)
    if isinstance(format, FloatFormat) and format.exponent_bits > CARRIERS[x.dtype].exponent_bits:
        return _round_to_own_scale(x.double(), format, how, held).to(x.dtype)
    return _round_scaled(x, exponent, format, how, held)


def _largest_finite(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest magnitude that is neither infinite nor NaN."""
    magnitudes = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
    return magnitudes.max() if dim is None else magnitudes.amax(dim, keepdim=True)


def _frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``torch.frexp`` of positive numbers, which Inductor cannot compile for float64."""
    carrier = CARRIERS[x.dtype]
    digits = carrier.fraction_bits
    subnormal = x < torch.finfo(x.dtype).smallest_normal
    pattern = torch.where(subnormal, x * 2.0 ** (digits + 1), x).view(carrier.integer)
    exponent = (pattern >> digits) - (carrier.bias - 1) - subnormal * (digits + 1)
    half = (carrier.bias - 1) << digits
    return ((pattern & ((1 << digits) - 1)) | half).view(x.dtype), exponent


def _largest_value(format: FloatFormat | FixedFormat) -> tuple[float, int]:
    """Return what ``frexp`` makes of a format's largest value."""
    if torch.compiler.is_dynamo_compiling():
        return math.frexp(format.max)
    return _cached_largest_value(format)


@cache
def _cached_largest_value(format: FloatFormat | FixedFormat) -> tuple[float, int]:
    return math.frexp(format.max)


def _scale_exponent(largest: Any, format: FloatFormat | FixedFormat) -> Any:
    """Return the smallest k with ``largest ≤ 2^k · max``, given what ``frexp`` makes of it."""
    (fraction, exponent), (top_fraction, top_exponent) = largest, _largest_value(format)
    return exponent - top_exponent + (fraction > top_fraction)


def _round_blocks(
    x: Tensor, format: BlockFormat, how: Rounding, axis: int, held: torch.dtype
) -> Tensor:
    """Round blocks along an axis, each with its own scale."""
    if x.numel() == 0:
        return x.clone()
    bits = how.bits
    if bits is not None:
        bits = bits._replace(words=_to_blocks(bits.words, format, axis))
    how = how._replace(overflow="saturate", bits=bits)
    values = _to_blocks(x, format, axis)
    exponent = _block_exponents(values, format)
    return _from_blocks(_round_scaled(values, exponent, format.element, how, held), x, axis)


def _block_exponents(blocks: Tensor, format: BlockFormat) -> Tensor:
    """Return the exponent of each block's scale, given blocks along the last dimension."""
    _, exponent = _frexp(_largest_finite(blocks, -1))
    limit = format.max_scale_exponent
    return (exponent - 1 - format.element.max_exponent).clamp_(-limit, limit)


def _to_blocks(x: Tensor, format: BlockFormat, axis: int) -> Tensor:
    """Return ``x`` with the axis as last two dimensions: blocks, the last padded with zeros."""
    rows = x.reshape(1) if x.dim() == 0 else x.movedim(axis, -1)
    padded = pad(rows, (0, -rows.shape[-1] % format.block_size))
    return padded.unflatten(-1, (-1, format.block_size))


def _from_blocks(blocks: Tensor, like: Tensor, axis: int) -> Tensor:
    if like.dim() == 0:
        return blocks.flatten()[0]
    return blocks.flatten(-2)[..., : like.shape[axis]].movedim(-1, axis).contiguous()


def in_range(x: Tensor, format: Format, scale: Scale) -> Tensor:
    """Return which elements lie between the format's smallest and largest value, as scaled."""
    if isinstance(scale, str):
        if not isinstance(format, BlockFormat):
            return x.isfinite()
    elif scale is not None:
        x = x / scale
    if not isinstance(format, BlockFormat) or x.numel() == 0:
        return (x >= format.min) & (x <= format.max)
    blocks = _to_blocks(x, format, -1)
    scaled = _times_power(blocks, -_block_exponents(blocks, format))
    return _from_blocks(in_range(scaled, format.element, None), x, -1)


def _round_scaled(
    x: Tensor,
    exponent: int | Tensor,
    format: FloatFormat | FixedFormat,
    how: Rounding,
    held: torch.dtype,
) -> Tensor:
    """Round with the scale ``2^exponent``."""
    scaled = _nonzero_if_directed(_times_power(x, -exponent), x, how)
    rounded = _round_unscaled(scaled, format, how, x.dtype)
    if how.overflow == "saturate":
        ends = torch.tensor([-1, 1], dtype=x.dtype, device=x.device) * torch.finfo(held).max
        low, high = (_times_power(end, -exponent) for end in ends)
        rounded = _between(rounded, low, high, format)
    return _times_power(rounded, exponent)


def _between(rounded: Tensor, low: Tensor, high: Tensor, format: Format) -> Tensor:
    """Return ``rounded`` with what is further out replaced by the format's last value inside."""

    def inside(end: Tensor) -> Tensor:
        return round_to_format(end, format, Rounding("zero"))

    return rounded.minimum(inside(high)).maximum(inside(low))


def _nonzero_if_directed(scaled: Tensor, x: Tensor, how: Rounding) -> Tensor:
    """Return ``scaled``, in which directed modes must not see what underflowed as zero."""
    if how.mode not in ("up", "down"):
        return scaled
    return keep_nonzero(scaled, x, torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps)


def _times_power(x: Tensor, exponent: int | Tensor) -> Tensor:
    """Return ``x · 2^exponent`` in three steps, since 2^exponent itself may be out of range."""
    carrier = CARRIERS[x.dtype]

    def power(k: Any) -> Any:
        if not isinstance(k, Tensor):
            return 2.0**k
        return ((k + carrier.bias) << carrier.fraction_bits).view(x.dtype)

    third: Any
    if isinstance(exponent, Tensor):
        exponent = exponent.to(carrier.integer)
        third = exponent.div(3, rounding_mode="trunc")
    else:
        third = int(exponent / 3)
    step = power(third)
    return (x * step).mul_(step).mul_(power(exponent - 2 * third))
