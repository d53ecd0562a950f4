"""A loader for data that lies in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy
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
        DataError: something else than tensors of rows, no rows, differing numbers of rows or
            devices, a batch size that is no whole number from 1, or an input or a label that is
            NaN or infinite (the batch, in file order, and the row are named).
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
        if not _is_count(batch_size):
            raise DataError(
                f"the batch size must be a whole number of at least 1, not {quoted(batch_size)}"
            )
        _check_rows(inputs, labels)
        _check_finite(inputs, batch_size, "input")
        _check_finite(labels, batch_size, "label")
        self.inputs = inputs
        self.labels = labels
        self.batch_size = int(batch_size)
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


def _is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 1, Python's or NumPy's."""
    return (
        isinstance(value, int | numpy.integer) and not isinstance(value, bool) and bool(value >= 1)
    )


def _check_rows(inputs: Tensor, labels: Tensor) -> None:
    """Raise DataError unless both are tensors of the same rows, and there are some."""
    for rows, what in ((inputs, "inputs"), (labels, "labels")):
        if not isinstance(rows, Tensor):
            raise DataError(
                f"the {what} must be a tensor, not a {type(rows).__name__}: torch.as_tensor makes "
                "one of an array or a list"
            )
        if rows.dim() == 0:
            raise DataError(
                f"the {what} must have a row for each sample, but are the single number "
                f"{quoted(rows.item())}"
            )
    if len(inputs) != len(labels):
        raise DataError(f"there are {len(inputs)} inputs but {len(labels)} labels")
    if len(labels) == 0:
        raise DataError("there are no samples to cut into batches")
    if inputs.device != labels.device:
        raise DataError(
            f"the inputs are on {inputs.device} but the labels on {labels.device}: move both to "
            "one device"
        )


def _check_finite(rows: Tensor, batch_size: int, what: str) -> None:
    """Raise DataError at the first number that is NaN or infinite."""
    if not (rows.is_floating_point() or rows.is_complex()):
        return
    numbers = rows.float() if rows.itemsize == 1 else rows  # few float8 dtypes know isfinite
    infinite = numbers.isfinite().logical_not_()
    if not infinite.any():
        return
    row, *within = infinite.nonzero()[0].tolist()
    batch, of_batch = divmod(row, batch_size)
    position = within[0] if len(within) == 1 else tuple(within)
    place = f" at position {position}" if within else ""
    raise DataError(
        f"the {what}s of batch {batch} hold {rows[(row, *within)].item()} in row {of_batch} "
        f"(row {row} of the data){place}: every {what} must be a finite number"
    )
