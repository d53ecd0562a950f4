"""A loader for data that lies in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halp.data.dataset import DataError


class Batches:
    """Cuts tensors into minibatches; can be iterated over any number of times.

    Every iteration visits each row once; the last batch is short where ``batch_size`` does not
    divide the number of rows. Rows come in file order or, with ``shuffle``, in a fresh order for
    each iteration, drawn when the iteration begins: starting another one while the first is
    under way does not change what is left of the first. The global random state is never touched.

    Args:
        inputs: tensor of N rows.
        labels: tensor of N rows on the same device.
        batch_size: rows in a batch, at least 1.
        shuffle: draw a fresh order for each iteration.
        seed: of the orders.

    Attributes:
        generator: the source of the orders, None in file order. Whoever restores its state
            after an extra iteration (``optimizer.snapshot`` does) leaves later orders unchanged.

    Raises:
        DataError: no rows, differing numbers of rows, a batch size below 1, or an input
            that is NaN or infinite (the batch, in file order, and the row are named).
    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"the batch size must be at least 1, not {batch_size}")
        if len(inputs) != len(labels):
            raise DataError(f"there are {len(inputs)} inputs but {len(labels)} labels")
        if len(labels) == 0:
            raise DataError("there are no samples to cut into batches")
        _check_finite(inputs, batch_size)
        self.inputs = inputs
        self.labels = labels
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed) if shuffle else None

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Not itself a generator function: one would draw the order only at its first next().
        if self.generator is None:
            return zip(
                self.inputs.split(self.batch_size), self.labels.split(self.batch_size), strict=True
            )
        order = torch.randperm(len(self.labels), generator=self.generator)
        rows = order.to(self.labels.device).split(self.batch_size)
        return ((self.inputs[chosen], self.labels[chosen]) for chosen in rows)


def _check_finite(inputs: Tensor, batch_size: int) -> None:
    if not inputs.is_floating_point():
        return
    finite = inputs.isfinite()
    if finite.all():
        return
    row = int(finite.flatten(1).all(1).logical_not().nonzero()[0])
    values = inputs[row][~finite[row]]
    batch, within = divmod(row, batch_size)
    raise DataError(
        f"the inputs of batch {batch} hold {values[0].item()} in row {within} "
        f"(row {row} of the data): every input must be a finite number"
    )
