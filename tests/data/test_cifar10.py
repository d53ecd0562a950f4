"""Claims about reading CIFAR-10: with small files of the same layout, and with real images."""

import io
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy
import pytest
import torch
from torchvision import transforms
from torchvision.datasets import CIFAR10

from halp.data import DataError, load_cifar10
from tests.data.pickled import cifar_content, python2_pickle, write

FOLDER = "cifar-10-batches-py"
MEANS, DEVIATIONS = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(CIFAR10, "url", "nowhere://")


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder with one training file of 6 images and a test file of 3."""
    folder = tmp_path / FOLDER
    write(folder / "data_batch_1", cifar_content(6))
    write(folder / "test_batch", cifar_content(3, seed=1))
    return folder


def normalized(content: dict) -> torch.Tensor:
    """What torchvision's transforms make of the pixels."""
    steps = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize(MEANS, DEVIATIONS)]  # (height, width, channel)
    )
    images = content["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return torch.stack([steps(image) for image in images])


def refusal(data_dir: Path) -> str:
    with pytest.raises(DataError) as refused:
        load_cifar10(data_dir)
    message = str(refused.value)
    assert "\n" not in message
    return message


# What is read.


@pytest.mark.parametrize("place", ["cifar10", "."])
def test_files_are_found_in_both_places(tmp_path, place):
    for name, rows, seed in (("data_batch_1", 6, 0), ("test_batch", 3, 1)):
        write(tmp_path / place / FOLDER / name, cifar_content(rows, seed))
    data = load_cifar10(tmp_path)
    assert data.name == "cifar10"
    assert data.n_classes == 10
    assert data.train_inputs.shape == (6, 3, 32, 32)
    assert data.train_inputs.dtype == torch.float32
    assert data.test_inputs.shape == (3, 3, 32, 32)
    assert data.train_labels.tolist() == cifar_content(6)["labels"]
    assert data.test_labels.tolist() == cifar_content(3, seed=1)["labels"]


def test_a_complete_folder_beside_an_incomplete_one_is_read(tmp_path, files):
    (tmp_path / "cifar10" / FOLDER).mkdir(parents=True)
    assert len(load_cifar10(tmp_path).train_labels) == 6


def test_images_are_normalized_as_torchvision_does(tmp_path, files):
    data = load_cifar10(tmp_path)
    assert torch.equal(data.train_inputs, normalized(cifar_content(6)))
    assert torch.equal(data.test_inputs, normalized(cifar_content(3, seed=1)))


def test_training_files_come_in_order_those_that_are_there(tmp_path, files):
    for number in (4, 2):
        write(files / f"data_batch_{number}", cifar_content(number, seed=number))
    parts = [cifar_content(6), cifar_content(2, seed=2), cifar_content(4, seed=4)]
    data = load_cifar10(tmp_path)
    assert data.train_labels.tolist() == sum((part["labels"] for part in parts), [])
    assert torch.equal(data.train_inputs, torch.cat([normalized(part) for part in parts]))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_is_read(tmp_path, files, protocol):
    expected = load_cifar10(tmp_path)
    write(files / "data_batch_1", cifar_content(6), protocol)
    data = load_cifar10(tmp_path)
    assert torch.equal(data.train_inputs, expected.train_inputs)
    assert torch.equal(data.train_labels, expected.train_labels)


@pytest.mark.parametrize("core", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_pickles_of_python_2_and_of_either_numpy_are_read(tmp_path, files, core):
    raw = python2_pickle(cifar_content(6))
    (files / "data_batch_1").write_bytes(raw.replace(b"numpy.core.multiarray", core))
    original = pickle.loads(raw, encoding="bytes")  # written by hand: is it what it claims to be?
    numpy.testing.assert_array_equal(original[b"data"], cifar_content(6)["data"])
    data = load_cifar10(tmp_path)
    assert torch.equal(data.train_inputs, normalized(cifar_content(6)))
    assert data.train_labels.tolist() == cifar_content(6)["labels"]


@pytest.mark.parametrize(
    "encode",
    [
        numpy.array,
        lambda labels: numpy.array(labels, ">i2"),
        lambda labels: list(numpy.array(labels)),
        lambda labels: [numpy.uint8(label) for label in labels],
    ],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_labels_may_be_numpys_numbers(tmp_path, files, encode, protocol):
    content = cifar_content(6)
    write(files / "data_batch_1", content | {"labels": encode(content["labels"])}, protocol)
    assert load_cifar10(tmp_path).train_labels.tolist() == content["labels"]


def test_pixels_stored_column_by_column_are_the_same(tmp_path, files):
    content = cifar_content(6)
    write(files / "data_batch_1", content | {"data": numpy.asfortranarray(content["data"])})
    assert torch.equal(load_cifar10(tmp_path).train_inputs, normalized(content))


# What is refused.


@pytest.mark.parametrize("missing", ["test_batch", "data_batch_1"])
def test_a_missing_file_is_named_and_nothing_is_downloaded_over_the_rest(
    tmp_path, files, missing, monkeypatch
):
    monkeypatch.setattr(CIFAR10, "__init__", lambda *args, **kwargs: pytest.fail("a download"))
    (files / missing).unlink()
    message = refusal(tmp_path)
    assert f"{files} lacks " in message
    assert missing in message


def test_absent_files_that_cannot_be_downloaded_give_one_sentence_saying_where_they_go(tmp_path):
    message = refusal(tmp_path)
    assert f"put the folder {FOLDER} into {tmp_path / 'cifar10'}" in message
    assert "--data-dir or $HALP_DATA" in message


def test_a_download_is_read_and_its_chatter_kept_off_stdout(tmp_path, monkeypatch, capsys):
    def download(self, root, download):
        print("downloading")
        write(Path(root) / FOLDER / "data_batch_1", cifar_content(6))
        write(Path(root) / FOLDER / "test_batch", cifar_content(3))

    monkeypatch.setattr(CIFAR10, "__init__", download)
    assert len(load_cifar10(tmp_path).train_labels) == 6
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("changes, complaint", [
    ({"data": numpy.zeros((6, 3071), numpy.uint8)}, "not uint8 of shape (6, 3071)"),
    ({"data": numpy.zeros((6, 3072), numpy.float32)}, "not float32 of shape (6, 3072)"),
    ({"data": numpy.zeros((6, 3, 32, 32), numpy.uint8)}, "not uint8 of shape (6, 3, 32, 32)"),
    ({"data": [[0] * 3072] * 6}, "must be a NumPy array, not a list"),
    ({"data": numpy.full((6, 3072), None)}, "an array of Python objects"),
    ({"data": numpy.full((6, 3072), "x")}, "the dtype 'U1' is none of numbers"),
    ({"labels": [0] * 5}, "has 6 images but 5 labels"),
    ({"labels": [0, 1, 2, 10, 4, 5]}, "0 ... 9, but the one in row 3 is 10"),
    ({"labels": [0, 1, -1, 3, 4, 5]}, "but the one in row 2 is -1"),
    ({"labels": [0.5] * 6}, "a list of integers, not a list that holds a float"),
    ({"labels": [2**70] * 6}, "a number beyond int64"),
    ({"labels": "012345"}, "a list of integers, not a str"),
    ({"labels": numpy.zeros((6, 1), int)}, "not int64 of shape (6, 1)"),
    ({"labels": [], "data": numpy.zeros((0, 3072), numpy.uint8)}, "has no images"),
])  # fmt: skip
def test_content_that_is_not_cifar_10_is_refused_with_the_file(tmp_path, files, changes, complaint):
    write(files / "data_batch_1", cifar_content(6) | changes)
    message = refusal(tmp_path)
    assert complaint in message
    assert str(files / "data_batch_1") in message


@pytest.mark.parametrize("name", ["data", "labels"])
def test_a_missing_entry_is_refused(tmp_path, files, name):
    content = cifar_content(3)
    del content[name]
    write(files / "test_batch", content)
    assert f"{files / 'test_batch'} has no {name!r}" in refusal(tmp_path)


def test_a_file_without_entries_is_refused(tmp_path, files):
    write(files / "test_batch", [1, 2])
    assert "holds a list, not the dict" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, files, keep):
    whole = (files / "data_batch_1").read_bytes()
    (files / "data_batch_1").write_bytes(whole[:keep])
    assert f"{files / 'data_batch_1'} is damaged or no pickle" in refusal(tmp_path)


def test_random_bytes_are_refused(tmp_path, files):
    random = numpy.random.default_rng(0)
    for _ in range(200):
        (files / "test_batch").write_bytes(random.bytes(200))
        refusal(tmp_path)


# Real images.


class Unchecked(CIFAR10):
    """torchvision's reader without its check of the published files' md5."""

    train_list = [["data_batch_1", None]]
    test_list = [["test_batch", None]]
    meta = {"filename": "batches.meta", "key": "label_names", "md5": None}


def test_real_images_are_those_that_torchvision_reads(halp_data):
    folder = halp_data / "cifar10-subset"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    data = load_cifar10(folder)
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEANS, DEVIATIONS)])
    for train, inputs, labels in (
        (True, data.train_inputs, data.train_labels),
        (False, data.test_inputs, data.test_labels),
    ):
        images = Unchecked(str(folder), train=train, transform=steps)
        assert labels.tolist() == images.targets
        assert all(torch.equal(image, images[row][0]) for row, image in enumerate(inputs))
    assert (len(data.train_labels), len(data.test_labels)) == (2000, 1000)


@pytest.mark.slow
def test_the_whole_data_set_has_its_published_counts_and_moments(halp_data, tmp_path):
    script = halp_data / "cifar10-jpeg" / "expand_to_torchvision.py"
    if not script.is_file():
        pytest.skip(f"needs {script}")
    subprocess.run([sys.executable, script, tmp_path], check=True)
    data = load_cifar10(tmp_path)
    assert data.train_labels.bincount().tolist() == [5000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
    assert data.train_inputs.double().mean((0, 2, 3)).abs().max() < 0.01


# What a user put there.


def pack(archive: Path, *names: str, rows: int = 6) -> None:
    """Write an archive as CIFAR-10's is, of files with that many images."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as packed:
        for name in names:
            raw = pickle.dumps(cifar_content(rows))
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            packed.addfile(member, io.BytesIO(raw))


@pytest.fixture
def no_download(monkeypatch):
    monkeypatch.setattr(CIFAR10, "__init__", lambda *args, **kwargs: pytest.fail("a download"))


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", ["cifar10", "."])
def test_an_archive_is_unpacked_whatever_its_checksum_and_stays(tmp_path, no_download, place):
    archive = tmp_path / place / "cifar-10-python.tar.gz"
    names = [f"{FOLDER}/{name}" for name in ("data_batch_1", "test_batch", "readme.html")]
    pack(archive, *names, "../data_batch_2", "/data_batch_3")
    before = archive.read_bytes()
    assert load_cifar10(tmp_path).train_labels.tolist() == cifar_content(6)["labels"]
    assert archive.read_bytes() == before
    there = {path.relative_to(archive.parent) for path in everything(tmp_path)}
    assert there == {Path(archive.name), Path(names[0]), Path(names[1])}


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"no archive"])
def test_a_damaged_archive_is_refused_named_and_kept(tmp_path, no_download, damage):
    archive = tmp_path / "cifar10" / "cifar-10-python.tar.gz"
    pack(archive, f"{FOLDER}/data_batch_1", f"{FOLDER}/test_batch")
    archive.write_bytes(damage(archive.read_bytes()))
    before = everything(tmp_path)
    assert f"{archive} cannot be unpacked: delete or replace it" in refusal(tmp_path)
    assert everything(tmp_path) == before


def test_an_archive_of_something_else_is_refused(tmp_path, no_download):
    pack(tmp_path / "cifar-10-python.tar.gz", "cifar-100-python/train")
    assert f"it has no file of {FOLDER}" in refusal(tmp_path)


@pytest.mark.parametrize("place", ["cifar10", "."])
def test_files_beside_the_folder_are_not_passed_over_for_a_download(tmp_path, no_download, place):
    write(tmp_path / place / "test_batch", cifar_content(3))
    assert f"{tmp_path / place / 'test_batch'} is not where the files of" in refusal(tmp_path)


def test_the_first_folder_that_has_any_of_the_files_is_not_passed_over(tmp_path, files):
    write(tmp_path / "cifar10" / FOLDER / "data_batch_1", cifar_content(2))
    assert f"{tmp_path / 'cifar10' / FOLDER} lacks test_batch" in refusal(tmp_path)


def test_a_download_that_fails_halfway_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, root, download):
        write(Path(root) / FOLDER / "test_batch", cifar_content(3))
        raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr(CIFAR10, "__init__", fail)
    assert "could not be downloaded" in refusal(tmp_path)
    assert list(tmp_path.iterdir()) == []
