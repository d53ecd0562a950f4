"""Bit centering: tensors that are a high-precision offset plus a low-precision delta."""

from halp.bitcenter import rules  # noqa: F401
from halp.bitcenter.cache import CacheError
from halp.bitcenter.cache_files import NoRoomError
from halp.bitcenter.convert import bit_center, is_bit_centered, materialize, to_plain, value
from halp.bitcenter.dispatch import register_rule
from halp.bitcenter.offsets import EXACT, LOW, SIGNED
from halp.bitcenter.operands import Decided, Operand
from halp.bitcenter.tensor import BitCenteredTensor

__all__ = [
    "EXACT",
    "LOW",
    "SIGNED",
    "BitCenteredTensor",
    "CacheError",
    "Decided",
    "NoRoomError",
    "Operand",
    "bit_center",
    "is_bit_centered",
    "materialize",
    "register_rule",
    "to_plain",
    "value",
]
