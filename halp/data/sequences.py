"""Sequences of differing lengths, padded to one."""

from __future__ import annotations

import torch
from torch import Tensor

from halp.data.dataset import IGNORED, DataError


def pad_sequences(flat: Tensor, lengths: Tensor, width: int, padding: int) -> Tensor:
    """Lay sequences that follow one another into the rows of a matrix.

    Args:
        flat: all sequences, (sum of lengths,).
        lengths: of each, (N,), at most ``width``.
        width: columns of the result.
        padding: what fills the rest of a row.

    Returns:
        (N, width), of the dtype of ``flat``.
    """
    padded = flat.new_full((len(lengths), width), padding)
    padded[torch.arange(width) < lengths[:, None]] = flat
    return padded


def trim_padding(
    inputs: Tensor, labels: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Cut a batch of padded sequences to its longest one.

    Args:
        inputs: (N, T) or (N, T, features).
        labels: (N, T); trailing columns in which all are `IGNORED` go, but the first one stays.
        generator: nothing is drawn from it; it is here so that this is a transform of `Batches`.

    Returns:
        Views of the first columns of both.

    Raises:
        DataError: the labels are not (N, T), or the inputs do not go with them.
    """
    if labels.dim() != 2 or inputs.shape[:2] != labels.shape:
        raise DataError(
            f"trim_padding takes inputs and labels of shape (N, T), not inputs of shape "
            f"{tuple(inputs.shape)} and labels of shape {tuple(labels.shape)}"
        )
    counting = (labels != IGNORED).any(0).nonzero()
    columns = int(counting[-1]) + 1 if len(counting) else 1
    return inputs[:, :columns], labels[:, :columns]
