"""Counter-based random bits: a hash of (seed, counters, element index), never a running state.

The same seed and counters give the same bits on every call, eager or compiled, on every device and
a resume. The mixing function is ``triple32`` (C. Wellons, "Prospecting for Hash Functions", 2018),
of three multiplications: with two, bits of small counters are visibly correlated. The second key
word enters after the first, so that two streams are not each other's permutation.
"""

from functools import cache
from typing import TypeAlias

import numpy
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

#: A 32-bit word: a Python int in [0, 2³²), or a 0-dim int64 tensor of the same range.
Word: TypeAlias = int | Tensor
#: What names a stream of random bits: two words.
Key: TypeAlias = tuple[Word, Word]

_WORD = 0xFFFFFFFF
#: Each round xors the word with itself shifted right, then multiplies; a last shift ends the mix.
_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST_SHIFT = 14


def _mix(word: Word) -> Word:
    """Bijectively scramble a 32-bit word (``triple32``)."""
    for shift, multiplier in _ROUNDS:
        word = ((word ^ (word >> shift)) * multiplier) & _WORD
    return word ^ (word >> _LAST_SHIFT)


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
    """Whether ``x`` stands for a tensor that a compiler traces, or ``torch.func`` transforms."""
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        return True
    return torch.compiler.is_dynamo_compiling() or is_functorch_wrapped_tensor(x)


#: Per round: the shift, the mask of what an arithmetic shift must not smear, the multiplier.
_ROUND_NUMBERS = tuple((k, _WORD >> k, m - (m >> 31 << 32)) for k, m in _ROUNDS)
_LAST_NUMBERS = (_LAST_SHIFT, _WORD >> _LAST_SHIFT)


#: Up to so many elements are hashed one by one.
_DIRECT = 1024
#: More are laid out in rows; their length divides this, so that most tensors have whole rows.
_ROW_DIVISORS = 2**10 * 3**2 * 5**3 * 7
#: The shift of the last mix of a row's words.
_ROW_NUMBERS = (15, _WORD >> 15)


def _hashed(count: int, key: Key, like: Tensor) -> Tensor:
    """Return the hashes of 0, 1, … under a key: int32, of shape (count,)."""
    if not is_traced(like) and like.device.type == "cpu":
        return _hashed_by_numpy(count, key)
    first, second = (_as_int32(word) for word in key)
    bits = torch.arange(count, dtype=torch.int32, device=like.device) ^ first
    for round, (shift, mask, multiplier) in enumerate(_ROUND_NUMBERS):
        bits ^= (bits >> shift) & mask
        bits *= multiplier
        if round == 0:
            bits ^= second
    shift, mask = _LAST_NUMBERS
    return bits ^ ((bits >> shift) & mask)


def _hashed_by_numpy(count: int, key: Key) -> Tensor:
    """Do the same for a small tensor in a third of the time."""
    first, second = (numpy.uint32(int(word)) for word in key)
    bits = _counting(1 << max(count - 1, 0).bit_length())[:count] ^ first
    for round, (shift, multiplier) in enumerate(_NUMPY_ROUNDS):
        bits ^= bits >> shift
        bits *= multiplier
        if round == 0:
            bits ^= second
    bits ^= bits >> _NUMPY_LAST_SHIFT
    return torch.from_numpy(bits.view(numpy.int32))


_NUMPY_ROUNDS = tuple((numpy.uint32(k), numpy.uint32(m)) for k, m in _ROUNDS)
_NUMPY_LAST_SHIFT = numpy.uint32(_LAST_SHIFT)


@cache
def _counting(count: int) -> numpy.ndarray:
    """Return 0, 1, …; shared: never write to it."""
    return numpy.arange(count, dtype=numpy.uint32)


def row_length(count: int) -> int:
    """Return the length of the rows that ``count`` elements are laid out in."""
    if count <= _DIRECT:
        return max(count, 1)
    length, rest = _ROW_DIVISORS, count
    while rest:  # math.gcd cannot be traced
        length, rest = rest, length % rest
    return length if length >= 64 else _DIRECT  # the last row is not whole then


def random_bits(x: Tensor, key: Key) -> Tensor:
    """Return an int32 tensor of the shape of ``x``, 32 random bits an element.

    Up to 1024 elements, they are hashes of their row-major index. More are laid out in rows i and
    columns j: with hashes a_i and b_j, and odd ones c_i, the words ``(a_i + b_j) · c_i`` are
    uniform and pairwise independent (multiply-add hashing: M. Dietzfelbinger, STACS 1996); their
    top half is mixed into the lower one, which a product leaves weaker.
    """
    count = int(x.numel())
    if count <= _DIRECT:
        return _hashed(count, key, x).view(x.shape)
    length = row_length(count)
    rows = -(-count // length)
    hashes = _hashed(length + 2 * rows, key, x)
    if is_traced(x):  # else a compiler hashes anew for every element
        hashes = hashes.as_strided(hashes.shape, (1,))
    columns, offsets, factors = hashes.split([length, rows, rows])
    bits = (offsets[:, None] + columns).mul_((factors | 1)[:, None]).view(-1)[:count]
    shift, mask = _ROW_NUMBERS
    bits ^= (bits >> shift).bitwise_and_(mask)
    return bits.view(x.shape)
