"""Fingerprints: numbers by which the values of tensors are recognized again."""

from functools import lru_cache

import torch
from torch import Tensor


def checksum(x: Tensor) -> int:
    """Return a number that differs where any bit of the elements of ``x`` does.

    It is a sum of the 32-bit words of memory, in row-major order, each times an odd random number
    of 64 bits of its own (modulo 2⁶⁴): one word that differs always changes it. Several leave it
    unchanged with a chance of 2⁻³² at most, also where they differ in their top bit alone, as ones
    from zeros nearly do. The same in every process.
    """
    # Contiguous, of whole words; a byte or half a word becomes one.
    flat = x.detach().contiguous().view(-1)
    if x.itemsize >= 4:
        words = (torch.view_as_real(flat).view(-1) if x.is_complex() else flat).view(torch.int32)
    else:
        words = flat.view(torch.uint8 if x.itemsize == 1 else torch.int16).to(torch.int32)
    count = words.numel()
    if count == 0:
        return 0
    numbers = _odd_numbers(1 << (count - 1).bit_length(), x.device)
    return int((words * numbers[:count]).sum())


def fingerprint(x: Tensor) -> int:
    """Return a number that differs where any bit of ``x``, its shape or its dtype does."""
    return hash((checksum(x), tuple(x.shape), str(x.dtype)))


@lru_cache(maxsize=64)
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    numbers = torch.randint(low, high, (count,), dtype=torch.int64, generator=generator)
    return numbers.bitwise_or_(1).to(device)
