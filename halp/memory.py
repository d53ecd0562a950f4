"""What a tensor's memory holds, and whether it still does."""

import numpy
import torch
from torch import Tensor


class Content:
    """What a tensor holds: tells later whether it still does, however it was written to.

    A version counter knows nothing of what NumPy writes, or ``.data``.
    """

    __slots__ = ("_bits",)

    def __init__(self, x: Tensor) -> None:
        self._bits = _bits_of(x).clone()

    def is_in(self, x: Tensor) -> bool:
        """Whether ``x`` is a tensor of the same shape and the same bits: also of NaN and of −0."""
        bits = _bits_of(x)
        if bits.device.type == "cpu":  # vectorized, unlike torch.equal
            return numpy.array_equal(bits.numpy(), self._bits.numpy())
        return torch.equal(bits, self._bits)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits_of(x: Tensor) -> Tensor:
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.resolve_neg().view(_WORDS[x.itemsize])


class Unchanged:
    """Tells whether a tensor holds what it held when this was made.

    Args:
        x: the tensor.
        version: its version, if nobody outside has got hold of its memory: whatever writes to it
            counts in that then. By default the content is compared.
    """

    __slots__ = ("__weakref__", "_content", "_version")

    def __init__(self, x: Tensor, version: int | None = None) -> None:
        self._version = version
        self._content = Content(x) if version is None else None

    def holds(self, x: Tensor, version: int) -> bool:
        """Whether ``x``, of this version now, has not changed."""
        return self._version == version if self._content is None else self._content.is_in(x)

    def hand_out(self, x: Tensor) -> None:
        """Compare the content from now on: somebody is about to get hold of the memory."""
        if self._content is None:
            self._content = Content(x)


def version_of(x: Tensor) -> int:
    """Return how often PyTorch has noted a write to ``x``; inference tensors count none."""
    return 0 if x.is_inference() else x._version


def in_memory(x: Tensor) -> tuple[Tensor, list[int] | None]:
    """Return the memory of ``x`` as one row, and the order of its dimensions in it.

    The order is None where it is that of ``x``. What has gaps comes back as it is.
    """
    if x.is_contiguous():
        return x.view(-1), None
    order = sorted(range(x.dim()), key=lambda d: (x.stride(d), x.shape[d]), reverse=True)
    ordered = x.permute(order)
    return (ordered.view(-1), order) if ordered.is_contiguous() else (x, None)


def in_order(row: Tensor, x: Tensor, order: list[int] | None) -> Tensor:
    """Return numbers in the order of the memory of ``x`` in its shape."""
    if order is None:
        return row.view(x.shape)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return row.view([x.shape[i] for i in order]).permute(inverse)
