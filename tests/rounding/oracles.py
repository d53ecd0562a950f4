"""What rounding must give: by gfloat, by the casts of other libraries, by lists of all values."""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import gfloat
import ml_dtypes
import numpy as np
import torch
from gfloat import RoundMode
from gfloat import formats as gf
from gfloat.types import Domain

from halp import quantize

#: The modes that draw nothing, as gfloat calls them.
MODES = {
    "near": RoundMode.TiesToEven,
    "near-away": RoundMode.TiesToAway,
    "zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
}
OVERFLOWS = ["saturate", "inf"]
CARRIERS = [np.float32, np.float64]
HALVES = [np.float16, ml_dtypes.bfloat16]

_TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _float(name, exponent_bits, fraction_bits, bias=None, high_nans=None, has_zero_sign=True):
    """gfloat's description of a format: like IEEE 754's, unless the arguments say otherwise."""
    extended = high_nans is None
    return gfloat.FormatInfo(
        name,
        k=1 + exponent_bits + fraction_bits,
        precision=fraction_bits + 1,
        bias=2 ** (exponent_bits - 1) - 1 if bias is None else bias,
        is_signed=True,
        domain=Domain.Extended if extended else Domain.Finite,
        has_nz=has_zero_sign,
        num_high_nans=2**fraction_bits - 1 if extended else high_nans,
        has_subnormals=True,
        is_twos_complement=False,
    )


def _fixed(name, bits):
    """Two's complement integers: gfloat's int8 with another width and a step of 1."""
    return gfloat.FormatInfo(
        name,
        k=bits,
        precision=bits,
        bias=2 - bits,
        is_signed=True,
        domain=Domain.Finite,
        has_nz=False,
        num_high_nans=0,
        has_subnormals=True,
        is_twos_complement=True,
    )


#: Every named format: gfloat's description, the scalar type of NumPy or ml_dtypes, torch's dtype.
FLOATS = {
    "fp32": (gf.format_info_binary32, np.float32, torch.float32),
    "tf32": (_float("tf32", 8, 10), None, None),
    "bf16": (gf.format_info_bfloat16, ml_dtypes.bfloat16, torch.bfloat16),
    "fp16": (gf.format_info_binary16, np.float16, torch.float16),
    "fp8_e4m3": (gf.format_info_ocp_e4m3, ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    "fp8_e5m2": (gf.format_info_ocp_e5m2, ml_dtypes.float8_e5m2, torch.float8_e5m2),
    "fp8_e4m3fnuz": (
        _float("e4m3fnuz", 4, 3, bias=8, high_nans=0, has_zero_sign=False),
        ml_dtypes.float8_e4m3fnuz,
        torch.float8_e4m3fnuz,
    ),
    "fp8_e5m2fnuz": (
        _float("e5m2fnuz", 5, 2, bias=16, high_nans=0, has_zero_sign=False),
        ml_dtypes.float8_e5m2fnuz,
        torch.float8_e5m2fnuz,
    ),
    "fp6_e2m3": (gf.format_info_ocp_e2m3, ml_dtypes.float6_e2m3fn, None),
    "fp6_e3m2": (gf.format_info_ocp_e3m2, ml_dtypes.float6_e3m2fn, None),
    "fp4_e2m1": (gf.format_info_ocp_e2m1, ml_dtypes.float4_e2m1fn, None),
}
#: Some of the formats that are known by construction; ml_dtypes has the IEEE-like 8-bit ones.
CONSTRUCTED = ["e4m3", "e3m4", "e5m7", "e2m1", "e8m1", "e8m23", "e9m2", "e11m3", "e11m52"]
_CONSTRUCTED_SCALARS = {"e4m3": ml_dtypes.float8_e4m3, "e3m4": ml_dtypes.float8_e3m4}
FIXED = ["fixed2", "fixed4", "fixed6", "fixed8", "fixed16", "fixed24", "fixed32"]
#: Blocks with a shared scale: gfloat's description and the format of the elements.
BLOCKS = {
    "mxfp8_e4m3": (gf.format_info_mxfp8_e4m3, "fp8_e4m3"),
    "mxfp8_e5m2": (gf.format_info_mxfp8_e5m2, "fp8_e5m2"),
    "mxfp6_e2m3": (gf.format_info_mxfp6_e2m3, "fp6_e2m3"),
    "mxfp6_e3m2": (gf.format_info_mxfp6_e3m2, "fp6_e3m2"),
    "mxfp4": (gf.format_info_mxfp4_e2m1, "fp4_e2m1"),
    "mxint8": (gf.format_info_mxint8, "the elements of mxint8"),
}
#: Formats of single values, all of them; and those of at most 8 bits.
ELEMENTWISE = [*FLOATS, *CONSTRUCTED, *FIXED]
EIGHT_BITS = [
    *(name for name, (info, *_) in FLOATS.items() if info.k <= 8),
    *("e4m3", "e3m4", "e2m1", "fixed8", "fixed6", "fixed4", "fixed2"),
]


@dataclass(frozen=True)
class Oracle:
    """A format as other libraries know it."""

    info: gfloat.FormatInfo
    #: The same format in NumPy or ml_dtypes, and in torch, if they have it.
    scalar: type | None = None
    dtype: torch.dtype | None = None

    @property
    def has_infinity(self) -> bool:
        return self.info.num_posinfs > 0

    @property
    def has_nan(self) -> bool:
        return self.info.num_nans > 0

    @property
    def is_fixed(self) -> bool:
        return self.info.is_twos_complement

    @property
    def top_exponent(self) -> int:
        return int(np.frexp(float(self.info.max))[1]) - 1

    def cast(self, x: np.ndarray) -> np.ndarray:
        """Round by the cast of NumPy or ml_dtypes; the latter rounds float64 twice."""
        with np.errstate(all="ignore"):
            return x.astype(self.scalar).astype(x.dtype)

    def round(self, x, rounding="near", overflow="saturate", subnormals=True, random=None):
        """Round by gfloat's arithmetic in float64, to an array of the dtype of ``x``.

        ``random`` is (R, k), k-bit integers: away from zero iff (R + ½)/2^k ≤ the distance to the
        value toward zero. gfloat's StochasticFast says the same of 2^k − 1 − R.
        """
        mode, bits = MODES.get(rounding, RoundMode.StochasticFast), {}
        if rounding == "stoc":
            integers, count = random
            flipped = 2**count - 1 - np.asarray(integers, dtype=np.int64)
            bits = {"srbits": flipped, "srnumbits": count}
        saturates = overflow == "saturate" or not (self.has_infinity or self.has_nan)
        with np.errstate(all="ignore"):
            wide = np.asarray(x).astype(np.float64)
            result = gfloat.round_ndarray(self.info, wide, mode, sat=saturates, **bits)
            if not (subnormals or self.is_fixed):
                result *= ~(np.abs(result) < self.info.smallest_normal)  # keeps the sign of zero
                result = result if self.info.has_nz else result + 0.0
            if saturates or self.info.max <= float(ml_dtypes.finfo(x.dtype).max):
                low, high = self.range_in(x.dtype)
                result = np.where(np.isinf(result), result, np.clip(result, low, high))
            return result.astype(x.dtype)

    def range_in(self, dtype) -> tuple[float, float]:
        """The most negative and the largest of the format's values that ``dtype`` can hold."""
        top = float(ml_dtypes.finfo(dtype).max)

        def largest_below(bound: float) -> float:
            if bound > top:
                toward_zero = RoundMode.TowardZero
                return float(gfloat.round_ndarray(self.info, np.array([top]), toward_zero)[0])
            nearest = np.asarray(bound, dtype=np.float64).astype(dtype)
            below = np.nextafter(nearest, np.zeros((), dtype))
            return float(below if float(nearest) > bound else nearest)

        return -largest_below(-float(self.info.min)), largest_below(float(self.info.max))

    def neighbours(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The largest value ≤ x and the smallest one ≥ x."""
        return self.round(x, "down"), self.round(x, "up")

    @cached_property
    def values(self) -> np.ndarray:
        """All finite values in ascending order, one zero: every code decoded, as float64."""
        bits = self.info.k
        if self.is_fixed:
            step = float(self.info.smallest_subnormal)
            return np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)) * step
        codes = np.arange(2**bits)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            if self.scalar is None:
                decoded = gfloat.decode_ndarray(self.info, codes)
            else:
                unsigned = f"uint{max(bits, 8)}"
                decoded = codes.astype(unsigned).view(self.scalar).astype(np.float64)
        return np.unique(decoded[np.isfinite(decoded)])

    def in_list(self, x: np.ndarray, rounding: str) -> np.ndarray:
        """Round, saturating, by comparisons with the list of all values that the dtype holds."""
        values = self.values[np.abs(self.values) <= np.finfo(x.dtype).max]
        inside = np.clip(x.astype(np.float64), values[0], values[-1])
        high = np.clip(np.searchsorted(values, inside), 1, len(values) - 1)
        low, high, on_high = values[high - 1], values[high], high
        middle = low + (high - low) / 2  # exact in float64
        even = (on_high - len(values) // 2) % 2 == 0
        goes_up = {
            "near": (inside > middle) | ((inside == middle) & even),
            "near-away": (inside > middle) | ((inside == middle) & (inside > 0)),
            "zero": (inside == high) | (inside < 0) & (inside > low),
            "up": inside > low,
            "down": inside == high,
        }[rounding]
        result = np.where(goes_up, high, low)
        result = np.copysign(result, x) if self.info.has_nz else result + 0.0
        return result.astype(x.dtype)


@lru_cache
def oracle(name: str) -> Oracle:
    """The oracle of a format of single values."""
    if name in FLOATS:
        return Oracle(*FLOATS[name])
    if name == BLOCKS["mxint8"][1]:
        return Oracle(gf.format_info_ocp_int8)
    if fixed := re.fullmatch(r"fixed(\d+)", name):
        return Oracle(_fixed(name, int(fixed[1])))
    exponent_bits, fraction_bits = map(int, re.fullmatch(r"e(\d+)m(\d+)", name).groups())
    return Oracle(_float(name, exponent_bits, fraction_bits), _CONSTRUCTED_SCALARS.get(name))


def round_blocks(x, name, rounding="near", axis=-1, subnormals=True, random=None) -> np.ndarray:
    """Round 32 at a time along ``axis`` with gfloat's elements and the scale of the OCP rule.

    NaN and infinities have no say in the scale: 2^(floor(log2 of the largest) − the largest
    exponent of an element), within 2^±127.
    """
    elements = oracle(BLOCKS[name][1])
    lines = np.moveaxis(x, axis, -1)
    result = np.empty_like(lines)
    bits = None if random is None else np.moveaxis(random[0], axis, -1)
    for index in np.ndindex(lines.shape[:-1]):
        for start in range(0, lines.shape[-1], 32):
            part = (*index, slice(start, start + 32))
            block = lines[part].astype(np.float64)
            largest = np.abs(np.where(np.isfinite(block), block, 0)).max()
            exponent = np.frexp(largest)[1] - 1 - elements.top_exponent if largest else -127
            scale = 2.0 ** np.clip(exponent, -127, 127)
            drawn = None if bits is None else (bits[part], random[1])
            with np.errstate(all="ignore"):
                rounded = elements.round(block / scale, rounding, "saturate", subnormals, drawn)
                result[part] = rounded * scale
    return np.moveaxis(result, -1, axis)


def random_patterns(carrier: type, count: int, seed: int = 0) -> np.ndarray:
    """Random bits read as numbers: every binade, subnormals, infinities, NaNs with payloads."""
    bits = 8 * np.dtype(carrier).itemsize
    return np.random.default_rng(seed).integers(0, 2**bits, count, f"uint{bits}").view(carrier)


def all_halves(carrier: type) -> np.ndarray:
    """Every float16 or bfloat16 there is."""
    return np.arange(2**16, dtype=np.uint16).view(carrier)


def without_nan(x: np.ndarray, name: str) -> np.ndarray:
    """``x``, but for the NaNs that the format cannot hold."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return x if oracle(name).has_nan else x[~np.isnan(x)]


@lru_cache
def hard_cases(name: str, carrier: type) -> np.ndarray:
    """Random patterns, the format's whole range, its values, all ties and their neighbours."""
    rng, oracle_ = np.random.default_rng(1), oracle(name)
    smallest, largest = float(oracle_.info.smallest_subnormal), float(oracle_.info.max)
    limits = np.log2(smallest) - 3, np.log2(largest) + 2
    with np.errstate(all="ignore"):
        within = rng.choice([-1, 1], 20_000) * np.exp2(rng.uniform(*limits, 20_000))
        finfo = np.finfo(carrier)
        special = [0.0, np.inf, np.nan, finfo.max, finfo.tiny, finfo.smallest_subnormal, largest]
        parts = [random_patterns(carrier, 20_000), within, special, np.negative(special)]
        if oracle_.info.k <= 16:
            values = oracle_.values
            beyond = 2 * values[-1] - values[-2]
            values = np.concatenate([[-beyond], values, [beyond]])
            ties = ((values[1:] + values[:-1]) / 2).astype(carrier)
            parts += [values, ties, np.nextafter(ties, np.inf, dtype=carrier)]
            parts += [np.nextafter(ties, -np.inf, dtype=carrier)]
        x = np.concatenate([np.asarray(part).astype(carrier) for part in parts])
    return without_nan(x, name)


def with_largest(largest: float, carrier: type, smallest: float = 0.0) -> np.ndarray:
    """Values of both signs over 40 binades, one of magnitude ``largest``; below smallest: 0."""
    rng = np.random.default_rng(2)
    x = largest * rng.uniform(-1, 1, 1000) * np.exp2(rng.integers(-40, 1, 1000))
    x[rng.integers(1000)] = rng.choice([-1, 1]) * largest
    x[np.abs(x) < smallest] = 0
    return x.astype(carrier)


def tensor_of(x: np.ndarray) -> torch.Tensor:
    """A tensor of the array's dtype, bfloat16 included."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def array_of(x: torch.Tensor) -> np.ndarray:
    """An array of the tensor's dtype, bfloat16 included."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def rounded(x: np.ndarray, *args, **kwargs) -> np.ndarray:
    """What halp makes of an array."""
    return array_of(quantize(tensor_of(x), *args, **kwargs))


def assert_same(actual: np.ndarray, expected: np.ndarray, x: np.ndarray) -> None:
    """Equal bit for bit, sign of zero included, but for the payloads of NaNs; says where not."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    actual, expected, x = (np.ascontiguousarray(a).ravel() for a in (actual, expected, x))
    unsigned = f"uint{8 * actual.dtype.itemsize}"
    equal = actual.view(unsigned) == expected.view(unsigned)
    (wrong,) = np.nonzero(~(equal | (np.isnan(actual) & np.isnan(expected))))
    report = [f"{x[i]!r}: {actual[i]!r}, expected {expected[i]!r}" for i in wrong[:5]]
    assert not len(wrong), f"{len(wrong)} of {len(x)} differ: {'; '.join(report)}"
