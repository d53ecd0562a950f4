"""Claims about reading MNIST: with small files of the same layout, and with the real ones."""

import gzip
import os
import struct
from pathlib import Path

import numpy
import pytest
import torch
from torchvision.datasets import MNIST

from halp.data import DataError, load_mnist
from halp.data.mnist import FILES

PARTS = {"train": 6, "t10k": 3}


def write_files(raw: Path, seed: int = 0) -> dict[str, tuple[numpy.ndarray, numpy.ndarray]]:
    """Write four files in MNIST's IDX layout, with random content; return it."""
    raw.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(seed)
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
    assert "lacks t10k-labels-idx1-ubyte: put" in str(refused.value)


@pytest.mark.parametrize("damage", [b"", b"not an IDX file at all"])
def test_damaged_files_are_named(tmp_path, no_network, damage):
    raw = tmp_path / "MNIST" / "raw"
    write_files(raw)
    (raw / "train-images-idx3-ubyte").write_bytes(damage)
    with pytest.raises(DataError, match=r"cannot be read .*: delete or replace it"):
        load_mnist(tmp_path)


def test_a_truncated_file_is_refused(tmp_path, no_network):
    raw = tmp_path / "MNIST" / "raw"
    write_files(raw)
    file = raw / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read"):
        load_mnist(tmp_path)


@pytest.fixture
def downloads(monkeypatch):
    """Make torchvision download other files of the same names; return the folders it wrote to."""
    folders = []

    class Downloaded(MNIST):
        def __init__(self, root, download):
            assert download
            folders.append(Path(root))
            write_files(Path(root) / "MNIST" / "raw", seed=9)

    monkeypatch.setattr("torchvision.datasets.MNIST", Downloaded)
    return folders


def contents(raw: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in raw.iterdir()}


@pytest.mark.parametrize("how", ["packed", "unpacked", "both"])
def test_files_that_are_there_are_read_and_never_written_to(tmp_path, downloads, how):
    """Those of Fashion-MNIST, say, whose checksums are not MNIST's."""
    raw = tmp_path / "mnist" / "MNIST" / "raw"
    content = write_files(raw)
    if how != "unpacked":
        pack(raw)
    if how == "both":  # then the unpacked ones are read
        content = write_files(raw, seed=1)
    before = contents(raw)
    data = load_mnist(tmp_path)
    images, labels = content["train"]
    assert data.train_labels.tolist() == labels.tolist()
    numpy.testing.assert_array_equal(data.train_inputs[:, 0], images / numpy.float32(255))
    assert contents(raw) == before and not downloads


def test_where_there_is_none_of_the_files_they_are_downloaded_and_moved_there(tmp_path, downloads):
    raw = tmp_path / "mnist" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "notes.txt").write_text("mine")
    data = load_mnist(tmp_path)
    assert len(data.train_labels) == 6
    (folder,) = downloads
    assert folder.parent == raw and not folder.exists()
    assert sorted(contents(raw)) == sorted([*FILES, "notes.txt"])
    assert torch.equal(load_mnist(tmp_path).train_labels, data.train_labels)
    assert len(downloads) == 1


def test_a_file_that_appears_during_the_download_stays(tmp_path, downloads, monkeypatch):
    raw = tmp_path / "mnist" / "MNIST" / "raw"
    link = os.link

    def late(source, target):
        if not target.exists():
            write_files(raw, seed=3)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    expected = write_files(tmp_path / "other", seed=3)
    assert load_mnist(tmp_path).train_labels.tolist() == expected["train"][1].tolist()


def test_some_files_are_not_completed_with_others_from_elsewhere(tmp_path, downloads):
    raw = tmp_path / "mnist" / "MNIST" / "raw"
    write_files(raw)
    (raw / FILES[2]).unlink()
    before = contents(raw)
    with pytest.raises(DataError, match=rf"lacks {FILES[2]}: put what is missing there"):
        load_mnist(tmp_path)
    assert contents(raw) == before and not downloads


def test_a_damaged_packed_file_is_named_and_kept(tmp_path, downloads):
    raw = tmp_path / "mnist" / "MNIST" / "raw"
    write_files(raw)
    pack(raw)
    for damage in (b"", b"no gzip", (raw / f"{FILES[0]}.gz").read_bytes()[:-9]):
        (raw / f"{FILES[0]}.gz").write_bytes(damage)
        with pytest.raises(
            DataError, match=rf"{FILES[0]}\.gz cannot be read .*: delete or replace"
        ):
            load_mnist(tmp_path)
        assert (raw / f"{FILES[0]}.gz").read_bytes() == damage
    assert not downloads


def test_what_has_other_images_or_more_classes_is_refused(tmp_path, no_network):
    raw = tmp_path / "MNIST" / "raw"
    write_files(raw)
    labels = raw / FILES[1]
    labels.write_bytes(labels.read_bytes()[:-1] + bytes([47]))
    with pytest.raises(DataError, match=r"must lie in 0 \.\.\. 9, but the one in row 5 is 47"):
        load_mnist(tmp_path)
    (raw / FILES[0]).write_bytes(struct.pack(">iiii", 0x0803, 6, 32, 32) + bytes(6 * 32 * 32))
    with pytest.raises(DataError, match=r"28 x 28 pixels, not \(32, 32\)"):
        load_mnist(tmp_path)


def pack(raw: Path) -> None:
    for file in sorted(raw.iterdir()):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()


def test_the_real_files_are_mnist(halp_data):
    data = load_mnist(halp_data)
    assert data.train_inputs.shape == (60000, 1, 28, 28)
    assert data.test_inputs.shape == (10000, 1, 28, 28)
    assert (data.train_inputs.min(), data.train_inputs.max()) == (0, 1)
    # Published: class counts of the training set and the mean of its pixels.
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.train_labels.bincount().tolist() == counts
    assert data.train_inputs.double().mean().item() == pytest.approx(0.1307, abs=5e-5)
