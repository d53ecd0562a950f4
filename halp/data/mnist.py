"""MNIST, or another data set of that layout, read from the files as published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor

from halp.data.dataset import DataError, Dataset
from halp.data.fetching import (
    FETCHING_ERRORS,
    UNFINISHED,
    fresh_folder,
    move_where_nothing_is,
    stdout_to_stderr,
)
from halp.data.idx import idx_files, read_idx
from halp.messages import reason_of

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
N_CLASSES = 10
SIDE = 28


def load_mnist(data_dir: Path | str) -> Dataset:
    """Load MNIST, downloading it into ``data_dir/mnist`` if it is not there.

    Files that are there are read, whatever they hold: those of Fashion-MNIST or KMNIST, which
    have the same names, are as good. They are never written to, and nothing is downloaded where
    there are some of them only.

    Args:
        data_dir: folder in which ``mnist/MNIST/raw`` or ``MNIST/raw`` holds the four files, each
            unpacked or as ``.gz``.

    Returns:
        Inputs float32 of shape (N, 1, 28, 28) in [0, 1], not normalized; labels 0 ... 9;
        of MNIST 60000 training and 10000 test images, in file order.

    Raises:
        DataError: the files are neither there nor to be downloaded, some of them are missing,
            damaged or in another place, or they hold something else.
    """
    raw = find_mnist(data_dir) or _download(Path(data_dir))
    train_inputs, train_labels = _read(raw, "train")
    test_inputs, test_labels = _read(raw, "t10k")
    return Dataset(
        name="mnist",
        train_inputs=train_inputs,
        train_labels=train_labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        n_classes=N_CLASSES,
    )


def find_mnist(data_dir: Path | str) -> Path | None:
    """Return the folder of the files that `load_mnist` reads; None if there are none of them.

    Raises:
        DataError: the first folder that has any of them has not all.
    """
    for raw in _places(Path(data_dir)):
        missing = [name for name in FILES if not idx_files(raw / name)]
        if not missing:
            return raw
        if len(missing) < len(FILES):
            raise DataError(
                f"{raw} holds only some of the files of MNIST, and a download would be mixed with "
                f"them: put {', '.join(missing)} into it, or move the others away"
            )
    return None


def _places(data_dir: Path) -> tuple[Path, Path]:
    return data_dir / "mnist" / "MNIST" / "raw", data_dir / "MNIST" / "raw"


def _download(data_dir: Path) -> Path:
    """Download MNIST whole or not at all; return its folder."""
    from torchvision.datasets import MNIST

    raw = _places(data_dir)[0]
    wanted = f"put {', '.join(FILES)} into {raw}"
    for stray in _strays(data_dir):
        raise DataError(
            f"{stray} is not where the files of MNIST are looked for, and nothing is downloaded "
            f"beside it: {wanted}, or move it away"
        )
    if raw.is_dir() and any(raw.iterdir()):
        raise DataError(
            f"{raw} has other files than those of MNIST, and nothing is downloaded beside them: "
            f"{wanted}, or move them away"
        )
    try:
        with fresh_folder(raw) as fresh, stdout_to_stderr():  # where failing mirrors are reported
            MNIST(str(fresh), download=True)
            move_where_nothing_is(fresh / "MNIST" / "raw", raw)
    except FETCHING_ERRORS as error:
        if (found := find_mnist(data_dir)) is not None:  # another process was faster
            return found
        raise DataError(
            f"MNIST is not in {data_dir} and could not be downloaded: {wanted}, or name the "
            f"folder that has them with --data-dir or $HALP_DATA (torchvision: {reason_of(error)})"
        ) from error
    return raw


def _strays(data_dir: Path) -> Iterator[Path]:
    """Yield files that somebody may mean to be read as MNIST, but which lie elsewhere."""
    own, other = _places(data_dir)
    yield from data_dir.glob("*ubyte*")
    for folder in (own.parents[1], other.parent):
        for pattern in ("*ubyte*", "processed/*.pt"):  # the latter of torchvision's older versions
            for file in folder.rglob(pattern):
                if not any(part.startswith(UNFINISHED) for part in file.parts):
                    yield file


def _read(raw: Path, part: str) -> tuple[Tensor, Tensor]:
    """Read images float32 (N, 1, 28, 28) in [0, 1] and N labels."""
    image_file, label_file = raw / f"{part}-images-idx3-ubyte", raw / f"{part}-labels-idx1-ubyte"
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(
            f"the images in {image_file} must be of {SIDE} x {SIDE} pixels, "
            f"not of {images.shape[1]} x {images.shape[2]}"
        )
    if len(images) != len(labels):
        raise DataError(
            f"{image_file} has {len(images)} images, but {label_file.name} {len(labels)} labels"
        )
    if len(images) == 0:
        raise DataError(f"{image_file} has no images")
    if labels.max() >= N_CLASSES:
        row = int((labels >= N_CLASSES).argmax())
        raise DataError(
            f"the labels in {label_file} must lie in 0 ... {N_CLASSES - 1}, "
            f"but the one in row {row} is {labels[row]}"
        )
    inputs = torch.empty(len(images), 1, SIDE, SIDE)
    numpy.copyto(inputs.numpy(), images[:, None])
    return inputs.div_(255), torch.from_numpy(labels.astype(numpy.int64))
