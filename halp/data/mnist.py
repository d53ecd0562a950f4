"""MNIST, read from torchvision's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from halp.data.dataset import DataError, Dataset
from halp.data.fetching import FETCHING_ERRORS, stdout_to_stderr
from halp.messages import reason_of

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def load_mnist(data_dir: Path | str) -> Dataset:
    """Load MNIST, downloading it into ``data_dir/mnist`` if it is not there.

    Args:
        data_dir: folder in which ``mnist/MNIST/raw`` or ``MNIST/raw`` holds the four files.

    Returns:
        Inputs float32 of shape (N, 1, 28, 28) in [0, 1], not normalized; labels 0 ... 9;
        60000 training and 10000 test images in file order.

    Raises:
        DataError: the files are neither there nor to be downloaded, or they cannot be read.
    """
    candidates = (Path(data_dir) / "mnist", Path(data_dir))
    folder = min(candidates, key=lambda folder: len(_missing(folder)))
    try:
        train, test = _read(folder, train=True), _read(folder, train=False)
    except FETCHING_ERRORS as error:
        advice = _advice(folder, Path(data_dir))
        raise DataError(f"{advice} (torchvision: {reason_of(error)})") from error
    return Dataset(
        name="mnist",
        train_inputs=_inputs(train),
        train_labels=train.targets,
        test_inputs=_inputs(test),
        test_labels=test.targets,
        n_classes=10,
    )


def _raw(folder: Path) -> Path:
    return folder / "MNIST" / "raw"


def _missing(folder: Path) -> tuple[str, ...]:
    """Those of the four files that lie in ``folder`` neither unpacked nor packed."""
    raw = _raw(folder)
    return tuple(
        name for name in FILES if not (raw / name).is_file() and not (raw / f"{name}.gz").is_file()
    )


def _advice(folder: Path, data_dir: Path) -> str:
    missing = _missing(folder)
    if not missing:
        return f"the MNIST files in {_raw(folder)} cannot be read: delete or replace them"
    return (
        f"MNIST is not in {data_dir} and could not be downloaded: put {', '.join(missing)} "
        f"into {_raw(folder)}, or name the folder that has them with --data-dir or $HALP_DATA"
    )


def _read(folder: Path, train: bool) -> Any:
    from torchvision.datasets import MNIST

    with stdout_to_stderr():  # torchvision reports failing mirrors there
        return MNIST(str(folder), train=train, download=True)


def _inputs(images: Any) -> Tensor:
    pixels: Tensor = images.data
    return pixels.unsqueeze(1).float().div_(255)
