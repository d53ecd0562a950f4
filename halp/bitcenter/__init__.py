"""Bit centering: tensors that are a high-precision offset plus a low-precision delta."""

from halp.bitcenter import rules  # noqa: F401
from halp.bitcenter.convert import bit_center, is_bit_centered, materialize, to_plain, value
from halp.bitcenter.dispatch import Decided, Operand, register_rule
from halp.bitcenter.tensor import BitCenteredTensor

__all__ = [
    "BitCenteredTensor",
    "Decided",
    "Operand",
    "bit_center",
    "is_bit_centered",
    "materialize",
    "register_rule",
    "to_plain",
    "value",
]
