"""MNIST, or what lies in its place, read from IDX files."""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import tempfile
import zlib
from pathlib import Path

import numpy
import torch
from torch import Tensor

from halp.data.dataset import DataError, Dataset
from halp.data.fetching import FETCHING_ERRORS, reason_of, stdout_to_stderr

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
N_CLASSES = 10
#: How an IDX file of bytes begins; the next byte is the number of its dimensions.
MAGIC = b"\x00\x00\x08"


def load_mnist(data_dir: Path | str) -> Dataset:
    """Load MNIST, downloading it into ``data_dir/mnist`` if none of its files is there.

    The files need not be the published ones: Fashion-MNIST has the same names and layout. Where a
    file lies both unpacked and packed (``.gz``), the unpacked one is read. Nothing that is there is
    written to.

    Args:
        data_dir: folder in which ``mnist/MNIST/raw`` or ``MNIST/raw`` holds the four files.

    Returns:
        Inputs float32 of shape (N, 1, 28, 28) in [0, 1], not normalized; labels 0 ... 9. Of MNIST
        60000 training and 10000 test images in file order.

    Raises:
        DataError: the files are neither there nor to be downloaded, some of them are missing, or
            they cannot be read.
    """
    raw = _raw_folder(Path(data_dir))
    train_inputs, train_labels, test_inputs, test_labels = (_read(raw, name) for name in FILES)
    return Dataset(
        name="mnist",
        train_inputs=_inputs(train_inputs, raw / FILES[0]),
        train_labels=_labels(train_labels, raw / FILES[1]),
        test_inputs=_inputs(test_inputs, raw / FILES[2]),
        test_labels=_labels(test_labels, raw / FILES[3]),
        n_classes=N_CLASSES,
    )


def _raw_folder(data_dir: Path) -> Path:
    """Return the folder of the files, after downloading them if there are none."""
    candidates = [folder / "MNIST" / "raw" for folder in (data_dir / "mnist", data_dir)]
    raw = min(candidates, key=lambda raw: len(_missing(raw)))
    missing = _missing(raw)
    if len(missing) == len(FILES):
        raw = candidates[0]
        _download(raw, data_dir)
    elif missing:
        raise DataError(
            f"{raw} lacks {', '.join(missing)}: put what is missing there, or move away what is "
            "there so that MNIST is downloaded"
        )
    return raw


def _missing(raw: Path) -> list[str]:
    """Those of the four files that lie in ``raw`` neither unpacked nor packed."""
    return [name for name in FILES if _found(raw, name) is None]


def _found(raw: Path, name: str) -> Path | None:
    return next((path for path in (raw / name, raw / f"{name}.gz") if path.exists()), None)


def _download(raw: Path, data_dir: Path) -> None:
    """Download into a folder of its own, and move what came to where nothing is yet."""
    from torchvision.datasets import MNIST

    try:
        raw.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=raw) as folder:
            with stdout_to_stderr():  # torchvision reports failing mirrors there
                MNIST(folder, download=True)
            for name in FILES:
                with contextlib.suppress(FileExistsError):  # somebody else has just downloaded it
                    os.link(Path(folder) / "MNIST" / "raw" / name, raw / name)
    except FETCHING_ERRORS as error:
        raise DataError(
            f"MNIST is not in {data_dir} and could not be downloaded: put {', '.join(FILES)} "
            f"into {raw}, or name the folder that has them with --data-dir or $HALP_DATA "
            f"(torchvision: {reason_of(error)})"
        ) from error


def _read(raw: Path, name: str) -> numpy.ndarray:
    """Read one file: an array of bytes.

    IDX (Y. LeCun, yann.lecun.com/exdb/mnist): the magic number, the number of dimensions, each
    size as four bytes, most significant first, then the elements.
    """
    path = _found(raw, name)
    assert path is not None
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(_unreadable(path, reason_of(error))) from error
    n_dims = int(name.partition("-idx")[2][0])
    header = 4 + 4 * n_dims
    if not content.startswith(MAGIC + bytes([n_dims])) or len(content) < header:
        raise DataError(_unreadable(path, f"it is no IDX file of bytes in {n_dims} dimensions"))
    shape = numpy.frombuffer(content, ">i4", n_dims, offset=4).tolist()
    if min(shape) < 0 or len(content) != header + math.prod(shape):
        raise DataError(
            _unreadable(path, f"it has {len(content)} bytes, and its header says {tuple(shape)}")
        )
    return numpy.frombuffer(content, numpy.uint8, offset=header).reshape(shape)


def _unreadable(path: Path, why: str) -> str:
    return f"{path} cannot be read ({why}): delete or replace it"


def _inputs(images: numpy.ndarray, path: Path) -> Tensor:
    if images.shape[1:] != (28, 28):
        raise DataError(f"the images in {path} must be of 28 x 28 pixels, not {images.shape[1:]}")
    return torch.from_numpy(images.copy()).unsqueeze(1).float().div_(255)


def _labels(labels: numpy.ndarray, path: Path) -> Tensor:
    if len(labels) and labels.max() >= N_CLASSES:
        row = int((labels >= N_CLASSES).argmax())
        raise DataError(
            f"the labels in {path} must lie in 0 ... {N_CLASSES - 1}, but the one in row {row} is "
            f"{labels[row]}"
        )
    return torch.from_numpy(labels.astype(numpy.int64))
