"""Claims about files under MNIST's names: read or refused, never replaced or passed over."""

import gzip
import hashlib
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import pytest
import torch
from torchvision.datasets import MNIST

from halp.data import DataError, load_mnist
from tests.data.test_mnist import write_files

RAW = "mnist/MNIST/raw"
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.fixture(autouse=True)
def downloads(monkeypatch) -> list[Path]:
    """Where downloads went to: each writes random files, as torchvision does."""
    folders = []

    def download(self, root, download):
        folders.append(Path(root))
        write_files(Path(root) / "MNIST" / "raw")

    monkeypatch.setattr(MNIST, "__init__", download)
    return folders


@pytest.fixture
def raw(tmp_path) -> Path:
    """A folder of a user's own files."""
    write_files(tmp_path / RAW)
    return tmp_path / RAW


def pack(file: Path) -> Path:
    packed = file.with_name(f"{file.name}.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    return packed


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def refusal(data_dir: Path) -> str:
    """The message of a refusal that left every file as it was."""
    before = snapshot(data_dir)
    with pytest.raises(DataError) as refused:
        load_mnist(data_dir)
    assert snapshot(data_dir) == before
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("forms", ["unpacked", "packed", "both"])
def test_files_that_are_not_mnists_are_read_and_stay_as_they_are(tmp_path, forms, downloads):
    raw = tmp_path / RAW
    images, labels = write_files(raw)["train"]
    for file in list(raw.iterdir()):
        if forms != "unpacked":
            pack(file)
        if forms == "packed":
            file.unlink()
    before = snapshot(tmp_path)
    data = load_mnist(tmp_path)
    numpy.testing.assert_array_equal(data.train_inputs[:, 0], images / numpy.float32(255))
    assert data.train_labels.tolist() == labels.tolist()
    assert snapshot(tmp_path) == before
    assert downloads == []


def test_each_file_may_be_packed_or_not_whatever_its_name(tmp_path, raw):
    expected = load_mnist(tmp_path)
    pack(raw / IMAGES).replace(raw / IMAGES)
    pack(raw / LABELS)
    (raw / LABELS).unlink()
    assert torch.equal(load_mnist(tmp_path).train_inputs, expected.train_inputs)


def test_a_packed_file_beside_the_same_one_unpacked_makes_no_difference(tmp_path, raw):
    expected = load_mnist(tmp_path)
    packed = pack(raw / IMAGES)
    assert torch.equal(load_mnist(tmp_path).train_inputs, expected.train_inputs)
    packed.write_bytes(
        gzip.compress((raw / IMAGES).read_bytes()[:9])
        + gzip.compress((raw / IMAGES).read_bytes()[9:])
    )  # in two pieces, whose last checksum is not that of the whole
    assert torch.equal(load_mnist(tmp_path).train_inputs, expected.train_inputs)


def test_a_packed_file_beside_another_one_unpacked_is_not_passed_over(tmp_path, raw):
    content = bytearray((raw / IMAGES).read_bytes())
    content[-1] ^= 1
    (raw / f"{IMAGES}.gz").write_bytes(gzip.compress(content))
    assert f"{raw / IMAGES} and {IMAGES}.gz beside it hold different data" in refusal(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:-20],
        lambda packed: packed[:30] + b"?" + packed[31:],
        lambda _: b"no",
        lambda _: b"",
    ],
    ids=["cut short", "a byte changed", "not packed", "empty"],
)
def test_a_damaged_packed_file_is_refused_named_and_kept(tmp_path, raw, damage):
    packed = pack(raw / IMAGES)
    (raw / IMAGES).unlink()
    packed.write_bytes(damage(packed.read_bytes()))
    assert f"{packed} cannot be read: delete or replace it" in refusal(tmp_path)


def test_a_damaged_packed_file_beside_the_unpacked_one_is_refused_and_kept(tmp_path, raw):
    packed = pack(raw / IMAGES)
    packed.write_bytes(packed.read_bytes()[:-20])
    assert f"{packed} cannot be read: delete or replace it" in refusal(tmp_path)


@pytest.mark.parametrize("there", [1, 3])
def test_files_of_two_data_sets_are_never_mixed_by_a_download(tmp_path, raw, there, downloads):
    for file in sorted(raw.iterdir())[there:]:
        file.unlink()
    assert "holds only some of the files of MNIST" in refusal(tmp_path)
    assert downloads == []


def test_the_first_folder_that_has_any_of_the_files_is_not_passed_over(tmp_path, raw):
    write_files(tmp_path / "MNIST" / "raw")
    (raw / LABELS).unlink()
    assert f"put {LABELS} into it" in refusal(tmp_path)


@pytest.mark.parametrize(
    "place",
    [f"mnist/{IMAGES}.gz", IMAGES, "mnist/MNIST/processed/training.pt", "MNIST/raw.ubyte"],
)
def test_files_in_another_place_are_not_passed_over_for_a_download(tmp_path, place, downloads):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_bytes(b"mine")
    assert f"{tmp_path / place} is not where the files of MNIST are" in refusal(tmp_path)
    assert downloads == []


def test_a_folder_with_other_files_is_left_as_it_is(tmp_path, downloads):
    (tmp_path / RAW).mkdir(parents=True)
    (tmp_path / RAW / "notes.txt").write_text("mine")
    assert "has other files than those of MNIST" in refusal(tmp_path)
    assert downloads == []


@pytest.mark.parametrize("place", [".", "mnist", RAW])
def test_a_download_comes_as_a_whole_and_leaves_nothing_else(tmp_path, place, downloads):
    (tmp_path / place).mkdir(parents=True, exist_ok=True)  # empty folders are in nobody's way
    assert len(load_mnist(tmp_path).train_labels) == 6
    assert sorted(snapshot(tmp_path)) == sorted(
        f"{RAW}/{f.name}" for f in (tmp_path / RAW).iterdir()
    )
    (fresh,) = downloads
    assert not fresh.exists()
    load_mnist(tmp_path)
    assert len(downloads) == 1


def test_a_download_that_fails_halfway_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, root, download):
        write_files(Path(root) / "MNIST" / "raw")
        raise RuntimeError("Error downloading:\nTried a\nTried b")

    monkeypatch.setattr(MNIST, "__init__", fail)
    assert "could not be downloaded" in refusal(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_appears_during_a_download_is_what_is_read(tmp_path, monkeypatch):
    def download(self, root, download):
        write_files(Path(root) / "MNIST" / "raw")
        write_files(tmp_path / RAW)
        (tmp_path / RAW / LABELS).write_bytes(b"\0\0\x08\1\0\0\0\x06" + bytes([7] * 6))

    monkeypatch.setattr(MNIST, "__init__", download)
    assert load_mnist(tmp_path).train_labels.tolist() == [7] * 6


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        (IMAGES, b"\0\0\x08\3" + bytes([0, 0, 0, 6, 0, 0, 0, 8, 0, 0, 0, 8]) + bytes(384),
         "must be of 28 x 28 pixels, not of 8 x 8"),
        (LABELS, b"\0\0\x08\1\0\0\0\5" + bytes(5), "has 6 images, but train-labels-idx1-ubyte 5"),
        (LABELS, b"\0\0\x08\1\0\0\0\x06" + bytes([0, 9, 10, 3, 26, 0]),
         "must lie in 0 ... 9, but the one in row 2 is 10"),
        (LABELS, b"\0\0\x08\1\0\0\0\x06" + bytes(5), "it has 5 bytes for an array of shape (6,)"),
        (LABELS, b"\0\0\x0d\1\0\0\0\x06" + bytes(24), "as an IDX file of bytes in 1 dimensions"),
    ],
)  # fmt: skip
def test_files_that_hold_something_else_are_named(tmp_path, raw, name, content, complaint):
    (raw / name).write_bytes(content)
    message = refusal(tmp_path)
    assert str(raw) in message
    assert name in message
    assert complaint in message


# With torchvision itself, from a mirror on this machine.


@pytest.fixture
def mirror(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder from which torchvision downloads; its content goes for the published one."""
    monkeypatch.undo()
    folder = tmp_path / "mirror"
    write_files(folder)
    packed = [pack(file) for file in sorted(folder.iterdir())]
    checksums = [(file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in packed]
    monkeypatch.setattr(MNIST, "resources", checksums)
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield folder
        server.shutdown()
        serving.join()


def test_a_users_own_packed_files_are_read_while_mnist_could_be_downloaded(tmp_path, mirror):
    data_dir = tmp_path / "data"
    write_files(data_dir / RAW)
    for name in (LABELS, "t10k-labels-idx1-ubyte"):
        content = (data_dir / RAW / name).read_bytes()
        (data_dir / RAW / name).write_bytes(content[:8] + bytes([7] * (len(content) - 8)))
    for file in list((data_dir / RAW).iterdir()):
        pack(file)
        file.unlink()
    before = snapshot(data_dir)
    assert load_mnist(data_dir).train_labels.tolist() == [7] * 6
    assert snapshot(data_dir) == before


def test_what_torchvision_downloads_is_read(tmp_path, mirror):
    first, again = load_mnist(tmp_path / "data"), load_mnist(tmp_path / "data")
    content = gzip.decompress((mirror / f"{LABELS}.gz").read_bytes())
    assert first.train_labels.tolist() == again.train_labels.tolist() == list(content[8:])
