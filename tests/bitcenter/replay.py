"""Recording what a bit-centered pass decided, and running a plain model with the same decisions.

A decision is which elements a ReLU lets through, or which element of its window a max-pool takes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halp.bitcenter import BitCenteredTensor, dispatch
from halp.bitcenter.cache import KeptOffset
from halp.bitcenter.offsets import SIGNED

aten = torch.ops.aten


class Decision(NamedTuple):
    """What one ReLU or max-pool saw, and what offset and full value decided.

    The offset is None where a cache does not keep it. ``before`` and ``after`` are masks of a
    ReLU, and flat indices of a max-pool's winners.
    """

    offset: Tensor | None
    delta: Tensor
    before: Tensor
    after: Tensor

    @property
    def changed(self) -> int:
        return int((self.before != self.after).sum())


@contextmanager
def recorded() -> Iterator[list[Decision]]:
    """Note, within the block, every decision of a forward pass on bit-centered tensors."""
    decisions: list[Decision] = []

    def relu(x: BitCenteredTensor, result: BitCenteredTensor) -> tuple[Tensor, Tensor]:
        positive = x._offset.read(SIGNED, x.context, x.delta.dtype) > 0
        return positive, result.decision.clone()

    def pool(x: BitCenteredTensor, result: tuple) -> tuple[Tensor, Tensor]:
        return result[1].offset.clone(), result[1].delta.clone()

    watched = {aten.relu.default: relu, aten.max_pool2d_with_indices.default: pool}
    originals = {op: dispatch.HANDLERS[op] for op in watched}
    for op, decided in watched.items():

        def handler(func: Any, x: Any, args: tuple, kwargs: dict, decided=decided) -> Any:
            is_kept = isinstance(x._offset, KeptOffset)  # then the offset itself is not there
            seen = None if is_kept else x.offset.clone(), x.delta.clone()
            result = originals[func](func, x, args, kwargs)
            decisions.append(Decision(*seen, *decided(x, result)))
            return result

        dispatch.HANDLERS[op] = handler
    try:
        yield decisions
    finally:
        dispatch.HANDLERS.update(originals)


@contextmanager
def moved_gradients() -> Iterator[list[Tensor]]:
    """Note, within the block, the offset gradients that max-pools send to a new winner."""
    moved: list[Tensor] = []
    op = aten.max_pool2d_with_indices_backward.default
    original = dispatch.HANDLERS[op]

    def handler(func: Any, like: Any, args: tuple, kwargs: dict) -> Any:
        gradient, *_, winner = args
        low = gradient.low_offset
        moved.append(low[winner.offset != winner.delta].double())
        return original(func, like, args, kwargs)

    dispatch.HANDLERS[op] = handler
    try:
        yield moved
    finally:
        dispatch.HANDLERS[op] = original


class Replay(TorchFunctionMode):
    """Within the block, ReLUs and max-pools of plain models follow decisions that are given.

    Attributes:
        seen: their inputs.
    """

    def __init__(self, decided: list[Tensor]) -> None:
        super().__init__()
        self.decided = decided
        self.seen: list[Tensor] = []

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in (F.relu, torch.relu, torch.relu_):
            return torch.where(self._next(args[0]), args[0], 0)
        if func in (F.max_pool2d, torch.max_pool2d):
            return _taken(args[0], self._next(args[0]))
        return func(*args, **(kwargs or {}))

    def _next(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return self.decided[len(self.seen) - 1]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        assert exception[0] or len(self.seen) == len(self.decided), "decisions are left over"


def decide(like: Tensor, x: Tensor) -> Tensor:
    """Return what x itself decides: winners of pools of 2 × 2, or a mask, as ``like`` is."""
    return F.max_pool2d(x, 2, return_indices=True)[1] if _are_winners(like) else x > 0


def distance_from_kink(choice: Tensor, x: Tensor) -> Tensor:
    """Return how far x is from where the decision turns: |x|, or what a winner lacks."""
    if not _are_winners(choice):
        return x.abs()
    return F.max_pool2d(x, 2) - _taken(x, choice)


def at_decision(choice: Tensor, size: Tensor) -> Tensor:
    """Return a size of deltas for each decision: of a pool, the largest of its window twice."""
    return 2 * F.max_pool2d(size, 2) if _are_winners(choice) else size


def _are_winners(choice: Tensor) -> bool:
    return choice.dtype == torch.int64


def _taken(x: Tensor, winners: Tensor) -> Tensor:
    return x.flatten(2).gather(2, winners.flatten(2)).view(winners.shape)
