"""Fingerprints: numbers by which the values of tensors are recognized again."""

from functools import lru_cache

import torch
from torch import Tensor


def checksum(x: Tensor) -> int:
    """Return a number that differs where any bit of the elements of ``x`` does.

    It is a sum of the words of memory, in row-major order, each times an odd random number of its
    own (modulo 2³²): one word that differs always changes it, several leave it unchanged with a
    chance of 2⁻³². The same in every process.
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
    numbers = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=generator)
    return numbers.bitwise_or_(1).to(device)
