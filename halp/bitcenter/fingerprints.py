"""Fingerprints: 64-bit numbers by which tensors are recognized again."""

from functools import lru_cache

import torch
from torch import Tensor


def fingerprint(x: Tensor) -> int:
    """Return a number that differs where any bit of ``x``, its shape or its dtype does.

    It is a sum of the 32-bit words of memory, each times an odd random number of 64 bits of its own
    (modulo 2⁶⁴): one word that differs always changes it. Several leave it unchanged with a chance
    of 2⁻³² at most, also where they differ in their top bit alone, as ones from zeros nearly do.
    """
    # Contiguous, of whole words; a byte or half a word becomes one.
    flat = x.detach().contiguous().view(-1)
    if x.itemsize >= 4:
        words = (torch.view_as_real(flat).view(-1) if x.is_complex() else flat).view(torch.int32)
    else:
        words = flat.view(torch.uint8 if x.itemsize == 1 else torch.int16).to(torch.int32)
    numbers = _odd_numbers(words.numel(), x.device)
    total = int((words * numbers).sum()) if words.numel() else 0
    return hash((total, tuple(x.shape), str(x.dtype)))


@lru_cache(maxsize=16)
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    numbers = torch.randint(low, high, (count,), dtype=torch.int64, generator=generator)
    return numbers.bitwise_or_(1).to(device)
