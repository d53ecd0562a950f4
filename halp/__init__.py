"""halp: high-accuracy low-precision training, simulated exactly on any PyTorch model."""

from halp import bitcenter, formats, optim
from halp.bitcenter import bit_center, materialize, to_plain, value
from halp.emulation import emulate
from halp.precision import Precision
from halp.quantization import Quantize
from halp.rounding import quantize

__all__ = [
    "Precision",
    "Quantize",
    "bit_center",
    "bitcenter",
    "emulate",
    "formats",
    "materialize",
    "optim",
    "quantize",
    "to_plain",
    "value",
]
