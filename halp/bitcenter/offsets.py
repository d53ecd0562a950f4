"""Offsets: the high-precision half of a bit-centered tensor, computed on site."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halp.precision import Precision, RoundedCopies, Rounder
from halp.random_bits import is_traced


class Offset:
    """One tensor's offset, and its low-precision copy once an operation has read it.

    In a backward pass an offset is computed when it is first read: that of a parameter's gradient,
    a third of the offset pass, is then computed only by solvers that use it.
    """

    __slots__ = ("_compute", "_low", "_low_version", "_tensor", "_view", "__weakref__")

    def __init__(
        self,
        tensor: Tensor | None,
        compute: Callable[[], Tensor] | None = None,
        view: "tuple[Offset, Callable[[Tensor], Tensor]] | None" = None,
    ) -> None:
        self._tensor = tensor
        self._compute = compute
        #: The offset that this one is a view of, and how to view its copy alike.
        self._view = view
        self._low: Tensor | None = None
        self._low_version = (-1, 0)

    @property
    def tensor(self) -> Tensor:
        """The unrounded offset."""
        if self._tensor is None:
            assert self._compute is not None
            self._tensor = self._compute()
            self._compute = None
        return self._tensor

    @property
    def is_computed(self) -> bool:
        """Whether reading the offset costs nothing."""
        return self._tensor is not None

    def low(self, rounder: Rounder, dtype: torch.dtype) -> Tensor:
        """Return the offset rounded once to the low-precision format, stored in ``dtype``."""
        tensor = self.tensor
        if is_traced(tensor):
            return rounder(tensor).to(dtype)
        version = (0 if tensor.is_inference() else tensor._version, rounder.generation)
        if self._low is None or self._low_version != version or self._low.dtype != dtype:
            if self._view is not None:
                base, view = self._view
                self._low = view(base.low(rounder, dtype))
            else:
                self._low = rounder(tensor).to(dtype)
            self._low_version = version
        return self._low


class Context:
    """What all tensors of one bit-centered model share.

    Attributes:
        precision: what deltas, and the copies of offsets that operations read, are rounded to.
        rounder: does the rounding.
        copies: the rounded copies of constants: network inputs, masks.
        offsets_only: while true (in a snapshot), operations compute offsets alone and leave deltas
            zero: the model is the plain model at w̃.
    """

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.rounder = Rounder(precision)
        self.copies = RoundedCopies(self.rounder)
        self.offsets_only = False
        self._pending: list[weakref.ref[Offset]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"precision": self.precision, "position": self.rounder.position}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["precision"])  # type: ignore[misc]
        self.rounder.position = state["position"]

    def __repr__(self) -> str:
        return f"Context({self.precision})"

    def new_step(self) -> None:
        """Start a training step: nothing it draws may depend on what earlier ones remembered."""
        self.rounder.new_step()
        self.copies.forget()

    def defer(self, compute: Callable[[], Tensor]) -> Offset:
        """Return an offset that is computed when first read."""
        offset = Offset(None, compute)
        if len(self._pending) > 4096:
            self._pending = [ref for ref in self._pending if _is_pending(ref())]
        self._pending.append(weakref.ref(offset))
        return offset

    def settle(self) -> None:
        """Compute every deferred offset that is still in use: its operands are about to change."""
        for ref in self._pending:
            offset = ref()
            if offset is not None:
                offset.tensor  # noqa: B018
        self._pending.clear()


def _is_pending(offset: Offset | None) -> bool:
    return offset is not None and not offset.is_computed
