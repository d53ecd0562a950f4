"""Fingerprints: 64-bit numbers by which tensors are recognized again."""

from functools import lru_cache

import torch
from torch import Tensor


def fingerprint(x: Tensor) -> int:
    """Return a number that differs where any bit of ``x``, its shape or its dtype does.

    It is a sum of the words of memory, each times an odd random number of its own (modulo 2³²):
    one word that differs always changes it, several leave it unchanged with a chance of 2⁻³².
    """
    # Contiguous, of whole words; a byte or half a word becomes one.
    flat = x.detach().contiguous().view(-1)
    if x.itemsize >= 4:
        words = (torch.view_as_real(flat).view(-1) if x.is_complex() else flat).view(torch.int32)
    else:
        words = flat.view(torch.uint8 if x.itemsize == 1 else torch.int16).to(torch.int32)
    total = int((words * _odd_numbers(words.numel(), x.device)).sum()) if words.numel() else 0
    return hash((total, tuple(x.shape), str(x.dtype)))


@lru_cache(maxsize=16)
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    numbers = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=generator)
    return numbers.bitwise_or_(1).to(device)
