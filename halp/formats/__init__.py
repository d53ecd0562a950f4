"""Number formats: frozen dataclasses, found by name.

A new format is one entry at the end of this file. ``python -m halp.formats`` prints them all.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, TypeVar

from halp.messages import quoted


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals and a sign bit.

    The finite values are ``±2^e · (1 + k/2^m)`` for ``min_exponent ≤ e ≤ max_exponent`` and the
    multiples of ``smallest_subnormal`` below ``smallest_normal`` (IEEE 754-2019, section 3.3; OCP
    8-bit Floating Point Specification 1.0 for ``fp8_e4m3`` and ``fp8_e5m2``).

    Raises:
        ValueError: fewer than 2 exponent bits or no fraction bit, or more than float64 has.
    """

    name: str
    #: Width of the exponent field.
    exponent_bits: int
    #: Width m of the stored significand: without the sign and the implicit leading bit.
    fraction_bits: int
    #: What is subtracted from the exponent field; 0 stands for ``2^(exponent_bits − 1) − 1``.
    bias: int = 0
    #: Whether the top exponent is reserved, for ±infinity and NaN.
    has_infinity: bool = True
    has_nan: bool = True
    has_negative_zero: bool = True
    #: How many values the top of the largest binade loses to NaN codes.
    missing_top_values: int = 0

    #: Each value is rounded by itself: rounding a view is viewing what is rounded.
    is_elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (2 <= self.exponent_bits <= 11 and 1 <= self.fraction_bits <= 52):
            raise ValueError(
                f"a float format has 2 to 11 exponent bits and 1 to 52 fraction bits, not "
                f"{self.exponent_bits} and {self.fraction_bits}"
            )
        if self.bias == 0:
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - 1)
        finest = self.min_exponent - (self.fraction_bits if self.exponent_bits < 11 else 0)
        if finest < -1022 or self.max_exponent > 1023:
            raise ValueError(f"{self.name} with bias {self.bias} reaches further than float64")

    @property
    def bits(self) -> int:
        """Width of a stored value, sign included."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return 2**self.exponent_bits - (2 if self.has_infinity else 1) - self.bias

    @property
    def max(self) -> float:
        """Largest finite value."""
        top_fraction = 2**self.fraction_bits - 1 - self.missing_top_values
        return 2.0**self.max_exponent * (1 + top_fraction / 2**self.fraction_bits)

    @property
    def min(self) -> float:
        """Most negative finite value."""
        return -self.max

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value of full precision."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value, and the spacing of all subnormals."""
        return 2.0 ** (self.min_exponent - self.fraction_bits)

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a normal value to nearest: ``2^−(m+1)``."""
        return 2.0 ** -(self.fraction_bits + 1)

    @property
    def landmarks(self) -> tuple[float, ...]:
        """Values of most digits and widest range: what holds them holds all."""
        return self.max, self.smallest_normal + self.smallest_subnormal, self.smallest_subnormal

    def __hash__(self) -> int:
        return hash(self.name)  # every rounding looks its constants up

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class FixedFormat:
    """Two's complement fixed point: the multiples of one step from ``min`` to ``max``.

    The step is ``2^−fraction_bits``, by default 1: what makes the values real numbers is the
    ``scale`` that they are rounded with. There is neither infinity nor NaN nor a negative zero.

    Raises:
        ValueError: fewer than 2 or more than 32 bits.
    """

    name: str
    #: Width of a stored value, sign included.
    bits: int
    #: How many of the bits are worth less than 1.
    fraction_bits: int = 0

    has_infinity = False
    has_nan = False
    has_negative_zero = False
    is_elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 32:
            raise ValueError(f"a fixed-point format has 2 to 32 bits, not {self.bits}")

    @property
    def max(self) -> float:
        """Largest value: ``(2^(bits − 1) − 1)`` steps."""
        return (2 ** (self.bits - 1) - 1) * self.smallest_normal

    @property
    def min(self) -> float:
        """Most negative value: ``−2^(bits − 1)`` steps."""
        return -(2 ** (self.bits - 1)) * self.smallest_normal

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest value."""
        return max(self.bits - 2, 0) - self.fraction_bits

    @property
    def smallest_normal(self) -> float:
        """The step: every value has the same absolute precision."""
        return 2.0**-self.fraction_bits

    @property
    def smallest_subnormal(self) -> float:
        """The step, which is the smallest positive value."""
        return self.smallest_normal

    @property
    def unit_roundoff(self) -> float:
        """Largest error of rounding to nearest, relative to the most negative value."""
        return 2.0**-self.bits

    @property
    def landmarks(self) -> tuple[float, ...]:
        """Values of most digits and widest range: what holds them holds all."""
        return self.max, self.min, self.smallest_subnormal

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class BlockFormat:
    """Blocks of elements that share a power-of-two scale.

    A block's scale is ``2^(floor(log2(largest magnitude)) − max_exponent of the element)``, within
    ``2^±127``; elements beyond the element's range saturate (OCP Microscaling Formats
    Specification 1.0, section 6.3).
    """

    name: str
    #: Format of the scaled elements.
    element: FloatFormat | FixedFormat
    #: Elements in a block; the last block of a row may have fewer.
    block_size: int = 32

    #: The scale is stored as an exponent of 8 bits, of which one code is for NaN.
    scale_bits = 8
    max_scale_exponent = 127
    has_infinity = False
    #: A value is rounded with its neighbours along the last dimension: views have others.
    is_elementwise: ClassVar[bool] = False

    @property
    def has_nan(self) -> bool:
        """Whether an element can be NaN."""
        return self.element.has_nan

    @property
    def has_negative_zero(self) -> bool:
        """Whether an element can be −0."""
        return self.element.has_negative_zero

    @property
    def bits(self) -> float:
        """Bits an element takes, its share of the scale included."""
        return self.element.bits + self.scale_bits / self.block_size

    @property
    def max(self) -> float:
        """Largest finite value, under the largest scale."""
        return 2.0**self.max_scale_exponent * self.element.max

    @property
    def min(self) -> float:
        """Most negative finite value, under the largest scale."""
        return 2.0**self.max_scale_exponent * self.element.min

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value of full precision, under the smallest scale."""
        return 2.0**-self.max_scale_exponent * self.element.smallest_normal

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value, under the smallest scale."""
        return 2.0**-self.max_scale_exponent * self.element.smallest_subnormal

    @property
    def unit_roundoff(self) -> float:
        """The element's."""
        return self.element.unit_roundoff

    @property
    def landmarks(self) -> tuple[float, ...]:
        """The element's: how far the scales reach depends on what is rounded."""
        return self.element.landmarks

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


Format: TypeAlias = FloatFormat | FixedFormat | BlockFormat
F = TypeVar("F", bound=Format)

_REGISTRY: dict[str, Format] = {}

#: Families of formats whose names say all about them: a pattern, and what makes the format.
_FAMILIES: dict[str, Callable[..., Format]] = {
    r"e(0|[1-9][0-9]{0,8})m(0|[1-9][0-9]{0,8})": FloatFormat,
    r"fixed(0|[1-9][0-9]{0,8})": FixedFormat,
}


def register(format: F) -> F:
    """Make ``format`` available by its name and return it.

    Raises:
        ValueError: another format has this name already.
        TypeError: ``format`` is no format.
    """
    if not isinstance(format, Format):
        raise TypeError(
            f"a format is a FloatFormat, FixedFormat or BlockFormat, not {quoted(format)}"
        )
    known = _REGISTRY.setdefault(format.name, format)
    if known != format:
        raise ValueError(
            f"a different format named {quoted(format.name)} is registered already: {quoted(known)}"
        )
    return format


def get(name: str | Format) -> Format:
    """Return the format called ``name``; a format is returned as it is.

    Beside the registered names there are ``"eXmY"`` (IEEE-like: X exponent and Y fraction bits,
    infinities, NaN) and ``"fixedB"`` (two's complement of B bits).

    Raises:
        ValueError: no format has this name, or it asks for more bits than can be emulated.
        TypeError: ``name`` is neither a string nor a format.
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"a format is a name, a FloatFormat, a FixedFormat or a BlockFormat, not {quoted(name)}"
        )
    return _REGISTRY[name] if name in _REGISTRY else _of_family(name)


def _of_family(name: str) -> Format:
    for pattern, make in _FAMILIES.items():
        match = re.fullmatch(pattern, name)
        if match:
            return make(name, *map(int, match.groups()))
    raise ValueError(
        f"unknown format {quoted(name)}; known formats: {', '.join(names())}, eXmY (as in e5m7) "
        "and fixedB (as in fixed8)"
    )


def names() -> list[str]:
    """Names of all registered formats, in the order of their registration."""
    return list(_REGISTRY)


register(FloatFormat("fp32", 8, 23))
register(FloatFormat("tf32", 8, 10))
register(FloatFormat("bf16", 8, 7))
register(FloatFormat("fp16", 5, 10))

# OCP 8-bit Floating Point Specification 1.0; the fnuz variants: P. Micikevicius et al.,
# arXiv 2209.05433, and B. Noune et al., arXiv 2206.02915.
_e4m3 = register(FloatFormat("fp8_e4m3", 4, 3, has_infinity=False, missing_top_values=1))
_e5m2 = register(FloatFormat("fp8_e5m2", 5, 2))
register(FloatFormat("fp8_e4m3fnuz", 4, 3, 8, has_infinity=False, has_negative_zero=False))
register(FloatFormat("fp8_e5m2fnuz", 5, 2, 16, has_infinity=False, has_negative_zero=False))

# OCP Microscaling Formats Specification 1.0.
_e2m3 = register(FloatFormat("fp6_e2m3", 2, 3, has_infinity=False, has_nan=False))
_e3m2 = register(FloatFormat("fp6_e3m2", 3, 2, has_infinity=False, has_nan=False))
_e2m1 = register(FloatFormat("fp4_e2m1", 2, 1, has_infinity=False, has_nan=False))
register(BlockFormat("mxfp8_e4m3", _e4m3))
register(BlockFormat("mxfp8_e5m2", _e5m2))
register(BlockFormat("mxfp6_e2m3", _e2m3))
register(BlockFormat("mxfp6_e3m2", _e3m2))
register(BlockFormat("mxfp4", _e2m1))
register(BlockFormat("mxint8", FixedFormat("int8", 8, fraction_bits=6)))

# Their names are patterns; these are the sizes that the paper and the table show.
register(FixedFormat("fixed8", 8))
register(FixedFormat("fixed16", 16))
