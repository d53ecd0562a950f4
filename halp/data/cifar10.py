"""CIFAR-10, read from the pickles of its Python version."""

from __future__ import annotations

import os
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy
import torch
from torch import Tensor

from halp.data.dataset import DataError, Dataset
from halp.data.fetching import (
    FETCHING_ERRORS,
    fresh_folder,
    move_where_nothing_is,
    stdout_to_stderr,
)
from halp.data.pickles import StoredArray, StoredNumber, load_pickle
from halp.messages import reason_of

FOLDER = "cifar-10-batches-py"
TRAINING_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
FILES = (*TRAINING_FILES, TEST_FILE)
ARCHIVE = "cifar-10-python.tar.gz"
N_CLASSES = 10
SHAPE = (3, 32, 32)
N_PIXELS = 3 * 32 * 32

# Of each channel, over the training set.
MEANS = (0.4914, 0.4822, 0.4465)
DEVIATIONS = (0.2023, 0.1994, 0.2010)


def load_cifar10(data_dir: Path | str) -> Dataset:
    """Load CIFAR-10, downloading it into ``data_dir/cifar10`` if it is not there.

    The files need not be the published ones: a part of them, or images that were encoded again,
    will do. They are read without executing anything that a pickle may ask for, never written to,
    and nothing is downloaded where there are some of them.

    Args:
        data_dir: folder in which ``cifar10/cifar-10-batches-py`` or ``cifar-10-batches-py``
            holds ``test_batch`` and at least one of ``data_batch_1`` ... ``data_batch_5``; or
            where, with neither folder, ``cifar-10-python.tar.gz`` is, to be unpacked beside it.

    Returns:
        Inputs float32 of shape (N, 3, 32, 32): pixels divided by 255, minus the training set's
        mean of each channel, divided by its deviation; labels 0 ... 9. Of the whole data
        50000 training and 10000 test images, in file order.

    Raises:
        DataError: the files are neither there nor to be downloaded, one of them is missing or
            damaged, or holds something else.
    """
    folder = _folder(Path(data_dir))
    training = [folder / name for name in TRAINING_FILES if (folder / name).is_file()]
    if not training:
        raise DataError(_missing(folder, f"any of {TRAINING_FILES[0]} ... {TRAINING_FILES[-1]}"))
    if not (folder / TEST_FILE).is_file():
        raise DataError(_missing(folder, TEST_FILE))
    train_inputs, train_labels = _read(training)
    test_inputs, test_labels = _read([folder / TEST_FILE])
    return Dataset(
        name="cifar10",
        train_inputs=train_inputs,
        train_labels=train_labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        n_classes=N_CLASSES,
    )


def _folder(data_dir: Path) -> Path:
    """Return the folder of the files, after unpacking or downloading them if there is none."""
    places = (data_dir / "cifar10", data_dir)
    folders = [place / FOLDER for place in places if os.path.lexists(place / FOLDER)]
    for folder in folders:
        if any((folder / name).exists() for name in FILES):
            return folder
    if folders:
        return folders[0]  # lacks everything, which is said where it is read
    for place in places:
        if os.path.lexists(place / ARCHIVE):
            return _unpacked(place / ARCHIVE)
    for stray in (place / name for place in places for name in FILES):
        if stray.exists():
            raise DataError(
                f"{stray} is not where the files of CIFAR-10 are looked for, and nothing is "
                f"downloaded beside it: put it into {places[0] / FOLDER}, or move it away"
            )
    return _download(data_dir)


def _unpacked(archive: Path) -> Path:
    """Unpack the files of an archive beside it, all of them or none; return their folder."""
    folder = archive.with_name(FOLDER)
    try:
        with fresh_folder(folder) as fresh:
            _unpack(archive, fresh / FOLDER)
            move_where_nothing_is(fresh / FOLDER, folder)
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        if (folder / TEST_FILE).is_file():  # another process was faster
            return folder
        raise DataError(
            f"{archive} cannot be unpacked: delete or replace it, or put the folder {FOLDER} "
            f"beside it ({reason_of(error)})"
        ) from error
    return folder


def _unpack(archive: Path, folder: Path) -> None:
    """Copy the files out of an archive into a new folder, and nothing else."""
    folder.mkdir()
    with tarfile.open(archive) as packed:
        for member in packed:
            path = PurePosixPath(member.name)
            content = packed.extractfile(member)  # None of what is no file
            if path.parent.name == FOLDER and path.name in FILES and content is not None:
                with content, (folder / path.name).open("xb") as file:
                    shutil.copyfileobj(content, file)
    if not any(folder.iterdir()):
        raise ValueError(f"it has no file of {FOLDER}")


def _download(data_dir: Path) -> Path:
    """Download CIFAR-10 whole or not at all; return its folder."""
    from torchvision.datasets import CIFAR10

    folder = data_dir / "cifar10" / FOLDER
    try:
        with fresh_folder(folder) as fresh, stdout_to_stderr():
            CIFAR10(str(fresh), download=True)
            move_where_nothing_is(fresh / FOLDER, folder)
    except FETCHING_ERRORS as error:
        if (folder / TEST_FILE).is_file():  # another process was faster
            return folder
        raise DataError(
            f"CIFAR-10 is not in {data_dir} and could not be downloaded: put the folder {FOLDER} "
            f"into {folder.parent}, or name the folder that has it with --data-dir or $HALP_DATA "
            f"(torchvision: {reason_of(error)})"
        ) from error
    return folder


def _missing(folder: Path, what: str) -> str:
    return (
        f"{folder} lacks {what}: put it there, or move the folder away so that CIFAR-10 is "
        "downloaded"
    )


def _read(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Read files one after the other into normalized images and labels."""
    parts = [_read_file(file) for file in files]
    images = torch.empty(sum(len(pixels) for pixels, _ in parts), *SHAPE)
    start = 0
    for pixels, _ in parts:
        # Converted while copied: the whole data exists once as bytes and once as float32.
        numpy.copyto(images[start : start + len(pixels)].numpy(), pixels.reshape(-1, *SHAPE))
        start += len(pixels)
    means, deviations = (torch.tensor(values).view(-1, 1, 1) for values in (MEANS, DEVIATIONS))
    images.div_(255).sub_(means).div_(deviations)
    return images, torch.cat([labels for _, labels in parts])


def _read_file(file: Path) -> tuple[numpy.ndarray, Tensor]:
    """Read one file: pixels uint8 (n, 3072), a channel after the other, and n labels."""
    content = load_pickle(file)
    if not isinstance(content, dict):
        raise DataError(f"{file} holds a {type(content).__name__}, not the dict of a CIFAR-10 file")
    pixels = _pixels(_entry(content, "data", file), file)
    labels = _labels(_entry(content, "labels", file), file)
    if len(labels) != len(pixels):
        raise DataError(f"{file} has {len(pixels)} images but {len(labels)} labels")
    if len(labels) == 0:
        raise DataError(f"{file} has no images")
    outside = ((labels < 0) | (labels >= N_CLASSES)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise DataError(
            f"the labels in {file} must lie in 0 ... {N_CLASSES - 1}, "
            f"but the one in row {row} is {int(labels[row])}"
        )
    return pixels, labels


def _entry(content: dict[Any, Any], name: str, file: Path) -> Any:
    # Written by Python 2, its keys are bytes.
    for key in (name, name.encode()):
        if key in content:
            return content[key]
    raise DataError(f"{file} has no {name!r}, so it is no CIFAR-10 file")


def _pixels(stored: Any, file: Path) -> numpy.ndarray:
    pixels = _array(stored, "data", file)
    if pixels.dtype != numpy.uint8 or pixels.ndim != 2 or pixels.shape[1] != N_PIXELS:
        raise DataError(
            f"the data in {file} must be uint8 of shape (n, {N_PIXELS}), "
            f"not {pixels.dtype} of shape {pixels.shape}"
        )
    return pixels


def _labels(stored: Any, file: Path) -> Tensor:
    if isinstance(stored, StoredArray):
        labels = _array(stored, "labels", file)
        if labels.dtype.kind in "iu" and labels.ndim == 1:
            return torch.from_numpy(labels.astype(numpy.int64))
        seen = f"{labels.dtype} of shape {labels.shape}"
    elif isinstance(stored, list):
        numbers = [_number(label) for label in stored]
        wrong = next((number for number in numbers if type(number) is not int), None)
        if wrong is None and all(-(2**63) <= number < 2**63 for number in numbers):
            return torch.tensor(numbers, dtype=torch.int64)
        seen = "a list that holds " + (
            "a number beyond int64" if wrong is None else f"a {type(wrong).__name__}"
        )
    else:
        seen = f"a {type(stored).__name__}"
    raise DataError(f"the labels in {file} must be a list of integers, not {seen}")


def _array(stored: Any, name: str, file: Path) -> numpy.ndarray:
    if not isinstance(stored, StoredArray):
        raise DataError(
            f"the {name} in {file} must be a NumPy array, not a {type(stored).__name__}"
        )
    try:
        return stored.array()
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"the {name} in {file} cannot be read: {reason_of(error)}") from error


def _number(stored: Any) -> Any:
    if not isinstance(stored, StoredNumber):
        return stored
    try:
        return stored.number()
    except (ValueError, TypeError, AttributeError):
        return stored
