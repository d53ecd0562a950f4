"""An oracle for rounding: number formats as NumPy and ml_dtypes know them, scales by hand."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Grid(NamedTuple):
    """A number format whose values a NumPy dtype holds."""

    dtype: Any
    max: float
    #: Of the smallest normal number.
    min_exponent: int
    fraction_bits: int

    def cast(self, x: np.ndarray) -> np.ndarray:
        """Round float64 values to the nearest, ties to even; beyond the range, to the largest."""
        return np.clip(x, -self.max, self.max).astype(self.dtype).astype(np.float64)

    def scale_of(self, x: np.ndarray) -> float:
        """Return the smallest power of two that brings all of ``x`` into the format's range."""
        largest = np.abs(x).max(initial=0.0)
        if largest == 0:
            return 1.0
        scale = 2.0 ** np.floor(np.log2(largest / self.max))
        while largest > self.max * scale:
            scale *= 2
        while largest <= self.max * scale / 2:
            scale /= 2
        return float(scale)

    def round(self, x: np.ndarray, scale: str | None) -> np.ndarray:
        s = self.scale_of(x) if scale == "auto" else 1.0
        return self.cast(x / s) * s

    def spacing(self, x: np.ndarray, scale: str | None) -> np.ndarray:
        """Return the distance of the format's values in the binade of each element."""
        s = self.scale_of(x) if scale == "auto" else 1.0
        _, exponent = np.frexp(x / s)
        exponent = np.where(x == 0, self.min_exponent, np.maximum(exponent - 1, self.min_exponent))
        return s * 2.0 ** (exponent - self.fraction_bits)

    def holds(self, x: np.ndarray, scale: str | None) -> bool:
        """Whether every element is a value of the format."""
        x = np.asarray(x, dtype=np.float64)
        return np.array_equal(self.round(x, scale), x)


GRIDS = {
    "fp16": Grid(np.float16, 65504.0, -14, 10),
    "fp8_e4m3": Grid(ml_dtypes.float8_e4m3fn, 448.0, -6, 3),
}
