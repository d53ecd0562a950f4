"""What a loaded data set is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""Label of padding: it counts in no loss, weight or accuracy; cross_entropy's ``ignore_index``."""


class DataError(ValueError):
    """Data that cannot be used; the message says what was wrong and what would be accepted."""


@dataclass(frozen=True)
class Dataset:
    """A classification data set, whole and in memory: of samples, or of sequences word by word.

    Sequences are padded to one length T and labelled at every word; the label of padding is
    `IGNORED`. Inputs and labels are checked when the object is made, so
    ``dataclasses.replace(data, n_classes=k)`` raises `DataError` where a label does not fit into
    k classes.
    """

    name: str
    train_inputs: Tensor  # (N, *input_shape), floating; or (N, T), int64 in [0, n_words)
    train_labels: Tensor  # (N,) or (N, T), int64 in [0, n_classes); in (N, T) also IGNORED
    test_inputs: Tensor  # (M, *input_shape)
    test_labels: Tensor  # (M,) or (M, T)
    n_classes: int
    n_words: int | None = None  # size of the vocabulary where inputs are indices of words

    def __post_init__(self) -> None:
        for count, what in ((self.n_classes, "classes"), (self.n_words, "words")):
            if count is not None and count < 1:
                raise DataError(f"the number of {what} must be at least 1, not {count}")
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
            _check_inputs(inputs, labels, self.n_words, f"the {part} inputs of {self.name}")

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
        """Move to a device, with floating inputs in ``dtype``; indices of words stay int64."""

        def moved(inputs: Tensor) -> Tensor:
            return inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)

        return dataclasses.replace(
            self,
            train_inputs=moved(self.train_inputs),
            train_labels=self.train_labels.to(device),
            test_inputs=moved(self.test_inputs),
            test_labels=self.test_labels.to(device),
        )


def units(labels: Tensor) -> int:
    """How many of the labels, of any shape, count: all but those that are `IGNORED`."""
    return int((labels != IGNORED).sum())


def _check_labels(labels: Tensor, n_classes: int, what: str) -> None:
    if labels.dim() not in (1, 2):
        raise DataError(f"{what} must have 1 or 2 dimensions, not shape {tuple(labels.shape)}")
    if labels.dtype != torch.int64:
        raise DataError(f"{what} must be int64, not {str(labels.dtype).removeprefix('torch.')}")
    ignored = labels == IGNORED if labels.dim() == 2 else torch.zeros_like(labels, dtype=torch.bool)
    outside = (((labels < 0) | (labels >= n_classes)) & ~ignored).nonzero()
    if len(outside):
        raise DataError(
            f"{what} must lie in 0 ... {n_classes - 1} ({n_classes} classes), "
            f"but the label in {_place(outside[0])} is {int(labels[tuple(outside[0])])}"
        )
    if labels.dim() == 2:
        empty = ignored.all(1).nonzero()
        if len(empty):
            raise DataError(
                f"{what} must count somewhere in every row, but not in {_place(empty[0])}"
            )


def _check_inputs(inputs: Tensor, labels: Tensor, n_words: int | None, what: str) -> None:
    if n_words is not None:
        if inputs.dtype != torch.int64 or inputs.dim() != 2:
            raise DataError(
                f"{what} must be indices of words, int64 of shape (N, T), "
                f"not {str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}"
            )
        outside = ((inputs < 0) | (inputs >= n_words)).nonzero()
        if len(outside):
            raise DataError(
                f"{what} must lie in 0 ... {n_words - 1} ({n_words} words), "
                f"but the index in {_place(outside[0])} is {int(inputs[tuple(outside[0])])}"
            )
    if labels.dim() == 2 and inputs.shape[:2] != labels.shape:
        raise DataError(
            f"{what} have shape {tuple(inputs.shape)}, "
            f"which does not go with labels of shape {tuple(labels.shape)}"
        )


def _place(position: Tensor) -> str:
    row, *column = position.tolist()
    return f"row {row}, column {column[0]}" if column else f"row {row}"
