"""halp: high-accuracy low-precision training, simulated exactly on any PyTorch model."""

from halp import bitcenter, formats, optim
from halp.bitcenter import bit_center, materialize, to_plain, value
from halp.emulation import emulate
from halp.rounding import quantize

__all__ = [
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
