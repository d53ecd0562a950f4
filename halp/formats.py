"""Number formats: frozen dataclasses, registered by name.

A new format is one entry at the end of this file.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals and a signed zero.

    The finite values are ``±2^e · (1 + k/2^m)`` for ``min_exponent ≤ e ≤ max_exponent`` and the
    multiples of ``smallest_subnormal`` below ``smallest_normal`` (IEEE 754-2019, section 3.3; OCP
    8-bit Floating Point Specification 1.0 for ``fp8_e4m3``).
    """

    name: str
    #: Width of the exponent field.
    exponent_bits: int
    #: Width m of the stored significand: without the sign and the implicit leading bit.
    fraction_bits: int
    #: Whether ±infinity has a code.
    has_infinity: bool = True
    #: How many values the top of the largest binade loses to NaN codes.
    missing_top_values: int = 0

    @property
    def bits(self) -> int:
        """Width of a stored value, sign included."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field: ``2^(exponent_bits − 1) − 1``."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number: one less where the top code is for infinity."""
        return self.bias if self.has_infinity else self.bias + 1

    @property
    def max(self) -> float:
        """Largest finite value."""
        top_fraction = 2**self.fraction_bits - 1 - self.missing_top_values
        return 2.0**self.max_exponent * (1 + top_fraction / 2**self.fraction_bits)

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

    def __hash__(self) -> int:
        return hash(self.name)  # every rounding looks its constants up

    def __str__(self) -> str:
        return self.name


_REGISTRY: dict[str, FloatFormat] = {}


def register(format: FloatFormat) -> FloatFormat:
    """Make ``format`` available by its name and return it.

    Raises:
        ValueError: another format has this name already.
    """
    known = _REGISTRY.setdefault(format.name, format)
    if known != format:
        raise ValueError(
            f"a different format named {format.name!r} is registered already: {known!r}"
        )
    return format


def get(name: str | FloatFormat) -> FloatFormat:
    """Return the format called ``name``; a format is returned as it is.

    Raises:
        ValueError: no format has this name.
        TypeError: ``name`` is neither a string nor a format.
    """
    if isinstance(name, FloatFormat):
        return name
    if not isinstance(name, str):
        raise TypeError(f"a format is a name or a FloatFormat, not {name!r}")
    try:
        return _REGISTRY[name]
    except KeyError:
        raise ValueError(f"unknown format {name!r}; known formats: {', '.join(names())}") from None


def names() -> list[str]:
    """Names of all registered formats, in the order of their registration."""
    return list(_REGISTRY)


register(FloatFormat("fp32", exponent_bits=8, fraction_bits=23))
register(FloatFormat("bf16", exponent_bits=8, fraction_bits=7))
register(FloatFormat("fp16", exponent_bits=5, fraction_bits=10))
register(
    FloatFormat(
        "fp8_e4m3", exponent_bits=4, fraction_bits=3, has_infinity=False, missing_top_values=1
    )
)
