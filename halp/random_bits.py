"""Counter-based random bits: a hash of (seed, counters, element index), never a running state.

The same seed and counters give the same bits on every call, eager or compiled, on every device and
after a resume. The mixing function is ``lowbias32`` (C. Wellons, "Prospecting for Hash Functions",
2018): exhaustively tested, two multiplications. The second key word enters between them, so that
two streams are not each other's permutation.
"""

from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

#: A 32-bit word: a Python int in [0, 2³²), or a 0-dim int64 tensor of the same range.
Word: TypeAlias = int | Tensor
#: What names a stream of random bits: two words.
Key: TypeAlias = tuple[Word, Word]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


def _mix(word: Word) -> Word:
    """Bijectively scramble a 32-bit word (``lowbias32``)."""
    word = word ^ (word >> 16)
    word = (word * _MULTIPLIERS[0]) & _WORD
    word = word ^ (word >> 15)
    word = (word * _MULTIPLIERS[1]) & _WORD
    return word ^ (word >> 16)


def stream_key(seed: int | Tensor, *counters: int | Tensor) -> Key:
    """Return the key of the stream that ``seed`` and ``counters`` name.

    Each is a Python int or a 0-dim int64 tensor (so that compiled code does not depend on its
    value); only the low 64 bits count.
    """
    first, second = _mix(seed & _WORD), _mix(((seed >> 32) & _WORD) ^ 0x9E3779B9)
    for counter in counters:
        first = _mix(first ^ (counter & _WORD))
        second = _mix((second + first + ((counter >> 32) & _WORD)) & _WORD)
    return first, second


def _as_int32(word: Word) -> Word:
    if isinstance(word, Tensor):
        return word.to(torch.int32)  # wraps
    return word - (1 << 32) if word >> 31 else word


def is_traced(x: Tensor) -> bool:
    """Whether ``x`` stands for a tensor that a compiler is tracing."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter)


@cache
def shared_constants(
    values: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return 0-dim tensors that eager operations take twice as fast as Python numbers.

    They are shared: never write to them. Traced code wants the numbers themselves.
    """
    return tuple(torch.tensor(value, dtype=dtype, device=device) for value in values)


#: Shift, mask of what an arithmetic right shift must not smear, multiplier: twice, then once more.
_HASH_NUMBERS = (16, 0xFFFF, 0x7FEB352D, 15, 0x1FFFF, 0x846CA68B - (1 << 32))


def random_bits(x: Tensor, key: Key) -> Tensor:
    """Return an int32 tensor of the shape of ``x``, 32 independent uniform bits an element.

    The element's row-major index is what is hashed: strides do not matter.
    """
    numbers: tuple = _HASH_NUMBERS
    if not is_traced(x):
        numbers = shared_constants(_HASH_NUMBERS, torch.int32, x.device)
    half, half_mask, multiplier, odd_half, odd_half_mask, other_multiplier = numbers
    first, second = (_as_int32(word) for word in key)
    bits = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    bits ^= first
    bits ^= (bits >> half) & half_mask
    bits *= multiplier
    bits ^= second
    bits ^= (bits >> odd_half) & odd_half_mask
    bits *= other_multiplier
    bits ^= (bits >> half) & half_mask
    return bits.view(x.shape)
