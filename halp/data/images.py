"""Images: the one shape that convolutional nets take, and random changes of training batches."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

from halp.data.dataset import DataError, Dataset

SIDE = 32
MARGIN = 4
"""Pixels by which `crop_and_flip` pads every side, so that a crop moves by at most as many."""


def as_images(data: Dataset) -> Dataset:
    """Bring the inputs into the shape (N, C, 32, 32) that convolutional nets take.

    Digits (N, 64) become images of one channel whose pixels are repeated 4 x 4 times; MNIST's
    (N, 1, 28, 28) are padded by 2 zeros on every side; images of 32 x 32 pixels stay.

    Raises:
        DataError: the inputs are none of these.
    """
    return dataclasses.replace(
        data,
        train_inputs=_images(data.train_inputs, data),
        test_inputs=_images(data.test_inputs, data),
    )


def crop_and_flip(
    inputs: Tensor, labels: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Augment a batch: a random crop of each zero-padded image, mirrored for one in two.

    Args:
        inputs: images (N, C, H, W) on any device, left as they are.
        labels: anything; returned as it is.
        generator: on the CPU, whatever the device of the images, so that the same crops are
            drawn on every device: N numbers for each of rows, columns and mirroring.

    Returns:
        New images of the same shape and dtype: each was padded by 4 zeros on every side, cut to
        H x W at a uniformly random place, and mirrored left to right with probability 1/2.

    Raises:
        DataError: the inputs are no images.
    """
    if inputs.dim() != 4:
        raise DataError(
            f"crop_and_flip takes images of shape (N, C, H, W), not inputs of shape "
            f"{tuple(inputs.shape)}"
        )
    count, channels, height, width = inputs.shape
    down, right = (torch.randint(2 * MARGIN + 1, (count, 1), generator=generator) for _ in range(2))
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    across = torch.arange(width)
    rows = (down + torch.arange(height)).to(inputs.device)
    columns = (right + torch.where(mirrored, across.flip(0), across)).to(inputs.device)
    images = torch.arange(count, device=inputs.device)
    planes = torch.arange(channels, device=inputs.device)
    padded = pad(inputs, (MARGIN,) * 4)
    cropped = padded[
        images[:, None, None, None],
        planes[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
    return cropped, labels


def _images(inputs: Tensor, data: Dataset) -> Tensor:
    shape = tuple(inputs.shape[1:])
    if data.n_words is None:
        if shape == (64,):
            pixels = inputs.reshape(-1, 1, 8, 8)
            return pixels.repeat_interleave(SIDE // 8, 2).repeat_interleave(SIDE // 8, 3)
        if shape == (1, 28, 28):
            return pad(inputs, ((SIDE - 28) // 2,) * 4)
        if len(shape) == 3 and shape[1:] == (SIDE, SIDE):
            return inputs
    seen = "words" if data.n_words is not None else f"inputs of shape {shape}"
    raise DataError(
        f"{data.name} has {seen}, of which no images of {SIDE} x {SIDE} pixels can be made: "
        f"a convolutional net takes inputs of shape (64,), (1, 28, 28) or (C, {SIDE}, {SIDE})"
    )
