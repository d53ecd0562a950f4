"""Claims about reading MNIST: with small files of the same layout, and with the real ones."""

import gzip
import struct
from pathlib import Path

import numpy
import pytest
import torch
from torchvision.datasets import MNIST

from halp.data import DataError, load_mnist

PARTS = {"train": 6, "t10k": 3}


def write_files(raw: Path) -> dict[str, tuple[numpy.ndarray, numpy.ndarray]]:
    """Write four files in MNIST's IDX layout, with random content; return it."""
    raw.mkdir(parents=True)
    random = numpy.random.default_rng(0)
    content = {}
    for part, rows in PARTS.items():
        images = random.integers(0, 256, (rows, 28, 28), dtype=numpy.uint8)
        labels = random.integers(0, 10, rows, dtype=numpy.uint8)
        image_header = struct.pack(">iiii", 0x0803, rows, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(image_header + images.tobytes())
        label_header = struct.pack(">ii", 0x0801, rows)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(label_header + labels.tobytes())
        content[part] = images, labels
    return content


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(MNIST, "mirrors", [])


@pytest.mark.parametrize("place", ["mnist/MNIST/raw", "MNIST/raw"])
def test_files_are_found_in_both_places(tmp_path, no_network, place):
    content = write_files(tmp_path / place)
    data = load_mnist(tmp_path)
    images, labels = content["train"]
    assert data.train_inputs.shape == (6, 1, 28, 28)
    assert data.train_inputs.dtype == torch.float32
    numpy.testing.assert_array_equal(data.train_inputs[:, 0], images / numpy.float32(255))
    assert data.train_labels.tolist() == labels.tolist()
    assert data.test_labels.tolist() == content["t10k"][1].tolist()


def test_files_left_beside_an_empty_folder_of_a_failed_download_are_found(tmp_path, no_network):
    write_files(tmp_path / "MNIST" / "raw")
    (tmp_path / "mnist" / "MNIST" / "raw").mkdir(parents=True)
    assert len(load_mnist(tmp_path).train_labels) == 6


def test_absent_files_that_cannot_be_downloaded_give_one_sentence_saying_where_they_go(
    tmp_path, no_network
):
    with pytest.raises(DataError) as refused:
        load_mnist(tmp_path)
    message = str(refused.value)
    assert "train-images-idx3-ubyte" in message
    assert str(tmp_path / "mnist" / "MNIST" / "raw") in message
    assert "HALP_DATA" in message
    assert "\n" not in message


def test_only_missing_files_are_asked_for(tmp_path, no_network):
    raw = tmp_path / "MNIST" / "raw"
    write_files(raw)
    (raw / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError) as refused:
        load_mnist(tmp_path)
    assert "put t10k-labels-idx1-ubyte into" in str(refused.value)


@pytest.mark.parametrize("damage", [b"", b"not an IDX file at all"])
def test_damaged_files_are_named(tmp_path, no_network, damage):
    raw = tmp_path / "MNIST" / "raw"
    write_files(raw)
    (raw / "train-images-idx3-ubyte").write_bytes(damage)
    with pytest.raises(
        DataError, match="train-images-idx3-ubyte cannot be read: delete or replace"
    ):
        load_mnist(tmp_path)


def test_a_truncated_file_is_refused(tmp_path, no_network):
    raw = tmp_path / "MNIST" / "raw"
    write_files(raw)
    file = raw / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read"):
        load_mnist(tmp_path)


def test_packed_files_are_read(tmp_path, no_network):
    raw = tmp_path / "MNIST" / "raw"
    content = write_files(raw)
    list(_pack(raw))
    assert load_mnist(tmp_path).train_labels.tolist() == content["train"][1].tolist()


def _pack(raw: Path):
    for file in sorted(raw.iterdir()):
        packed = file.with_name(f"{file.name}.gz")
        packed.write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
        yield file.name, packed


def test_the_real_files_are_mnist(halp_data):
    data = load_mnist(halp_data)
    assert data.train_inputs.shape == (60000, 1, 28, 28)
    assert data.test_inputs.shape == (10000, 1, 28, 28)
    assert (data.train_inputs.min(), data.train_inputs.max()) == (0, 1)
    # Published: class counts of the training set and the mean of its pixels.
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.train_labels.bincount().tolist() == counts
    assert data.train_inputs.double().mean().item() == pytest.approx(0.1307, abs=5e-5)
