"""What a loaded data set is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor


class DataError(ValueError):
    """Data that cannot be used; the message says what was wrong and what would be accepted."""


@dataclass(frozen=True)
class Dataset:
    """A classification data set, whole and in memory.

    Labels are checked when the object is made, so ``dataclasses.replace(data, n_classes=k)``
    raises `DataError` where a label does not fit into k classes.
    """

    name: str
    train_inputs: Tensor  # (N, *input_shape), floating
    train_labels: Tensor  # (N,), int64 in [0, n_classes)
    test_inputs: Tensor  # (M, *input_shape)
    test_labels: Tensor  # (M,)
    n_classes: int

    def __post_init__(self) -> None:
        if self.n_classes < 1:
            raise DataError(f"the number of classes must be at least 1, not {self.n_classes}")
        for part, inputs, labels in (
            ("training", self.train_inputs, self.train_labels),
            ("test", self.test_inputs, self.test_labels),
        ):
            if len(inputs) != len(labels):
                raise DataError(
                    f"{self.name} has {len(inputs)} {part} inputs but {len(labels)} {part} labels"
                )
            if len(labels) == 0:
                raise DataError(f"{self.name} has no {part} samples")
            _check_labels(labels, self.n_classes, f"the {part} labels of {self.name}")

    @property
    def input_shape(self) -> torch.Size:
        """Shape of one input."""
        return self.train_inputs.shape[1:]

    @property
    def n_features(self) -> int:
        """Numbers in one input."""
        return self.input_shape.numel()

    def first(self, n_train: int) -> Dataset:
        """Keep only the first ``n_train`` training samples; the test samples all stay."""
        if n_train < 1:
            raise DataError(f"at least 1 training sample has to be kept, not {n_train}")
        return dataclasses.replace(
            self,
            train_inputs=self.train_inputs[:n_train],
            train_labels=self.train_labels[:n_train],
        )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Dataset:
        """Move to a device, with the inputs in ``dtype``."""
        return dataclasses.replace(
            self,
            train_inputs=self.train_inputs.to(device, dtype),
            train_labels=self.train_labels.to(device),
            test_inputs=self.test_inputs.to(device, dtype),
            test_labels=self.test_labels.to(device),
        )


def _check_labels(labels: Tensor, n_classes: int, what: str) -> None:
    outside = ((labels < 0) | (labels >= n_classes)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise DataError(
            f"{what} must lie in 0 ... {n_classes - 1} ({n_classes} classes), "
            f"but the label in row {row} is {int(labels[row])}"
        )
