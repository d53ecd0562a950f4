"""A loader for data that lies in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from halp.data.dataset import DataError
from halp.messages import quoted

Transform: TypeAlias = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]
"""Maps inputs and labels of a batch to those that are yielded; draws only from the generator."""


class Batches:
    """Cuts tensors into minibatches; can be iterated over any number of times.

    Every iteration visits each row once; the last batch is short where ``batch_size`` does not
    divide the number of rows. Rows come in file order or, with ``shuffle``, in a fresh order for
    each iteration. All that an iteration draws is settled when it begins, even what a transform
    draws later: starting another one while the first is under way does not change what is left
    of the first. The global random state is never touched.

    Args:
        inputs: tensor of N rows.
        labels: tensor of N rows on the same device.
        batch_size: rows in a batch, at least 1.
        shuffle: draw a fresh order for each iteration.
        seed: of the orders and of what the transform draws.
        transform: applied to every batch when it is yielded, as in ``crop_and_flip``: it takes
            inputs, labels and a CPU generator that is the iteration's own, and must leave the
            tensors that it is given as they are.

    Attributes:
        generator: the source of all randomness, from which each iteration draws when it begins;
            None with neither ``shuffle`` nor ``transform``. Whoever restores its state after an
            extra iteration (``optimizer.snapshot`` does) leaves later batches unchanged.

    Raises:
        DataError: no rows, differing numbers of rows, a batch size below 1, or an input or a
            label that is NaN or infinite (the batch, in file order, and the row are named).
    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise DataError(f"the batch size must be a whole number from 1, not {batch_size!r}")
        for what, tensor in (("inputs", inputs), ("labels", labels)):
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                raise DataError(f"the {what} must be a tensor of rows, not {quoted(tensor)}")
        if len(inputs) != len(labels):
            raise DataError(f"there are {len(inputs)} inputs but {len(labels)} labels")
        if len(labels) == 0:
            raise DataError("there are no samples to cut into batches")
        _check_finite("inputs", inputs, batch_size)
        _check_finite("labels", labels, batch_size)
        self.inputs = inputs
        self.labels = labels
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.transform = transform
        drawing = shuffle or transform is not None
        self.generator = torch.Generator().manual_seed(seed) if drawing else None

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Not itself a generator function: one would draw only at its first next().
        batches = self._rows()
        if self.transform is None:
            return batches
        transform, own = self.transform, torch.Generator()
        own.manual_seed(int(torch.randint(2**63 - 1, (), generator=self.generator)))
        return (transform(inputs, labels, own) for inputs, labels in batches)

    def _rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.shuffle:
            return zip(
                self.inputs.split(self.batch_size), self.labels.split(self.batch_size), strict=True
            )
        order = torch.randperm(len(self.labels), generator=self.generator)
        rows = order.to(self.labels.device).split(self.batch_size)
        return ((self.inputs[chosen], self.labels[chosen]) for chosen in rows)


def _check_finite(what: str, rows: Tensor, batch_size: int) -> None:
    if not rows.is_floating_point():
        return
    finite = rows.isfinite()
    if finite.all():
        return
    row = int(finite.reshape(len(rows), -1).all(1).logical_not().nonzero()[0])
    values = rows[row][~finite[row]]
    batch, within = divmod(row, batch_size)
    raise DataError(
        f"the {what} of batch {batch} hold {values[0].item()} in row {within} "
        f"(row {row} of the data): all of them must be finite numbers"
    )
