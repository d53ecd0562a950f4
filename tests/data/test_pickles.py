"""A pickle can ask Python to run anything; ours must not."""

import builtins
import importlib
import os
import pickle
import subprocess

import numpy
import pytest

from halp.data import DataError, load_cifar10
from halp.data.pickles import load_pickle
from tests.data.pickled import Calls, cifar_content, write


@pytest.fixture
def marker(tmp_path):
    """A file that exists only if a hostile pickle was carried out."""
    return tmp_path / "executed"


ATTACKS = {
    "posix.system": lambda marker: Calls(os.system, f"touch {marker}"),
    "builtins.eval": lambda marker: Calls(eval, f"open({str(marker)!r}, 'w')"),
    "builtins.exec": lambda marker: Calls(exec, f"open({str(marker)!r}, 'w')"),
    "builtins.getattr": lambda marker: Calls(getattr, marker, "touch"),
    "subprocess.Popen": lambda marker: Calls(subprocess.Popen, ["touch", str(marker)]),
    "importlib.import_module": lambda marker: Calls(importlib.import_module, "antigravity"),
    "pathlib": lambda marker: marker,
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("entry", ["data", "labels", "anything"])
def test_a_hostile_pickle_is_refused_unexecuted_and_its_wish_named(
    tmp_path, marker, name, protocol, entry
):
    write(tmp_path / "cifar-10-batches-py" / "data_batch_1", cifar_content(2))
    hostile = tmp_path / "cifar-10-batches-py" / "test_batch"
    write(hostile, cifar_content(2) | {entry: ATTACKS[name](marker)}, protocol)
    with pytest.raises(DataError) as refused:
        load_cifar10(tmp_path)
    wanted = name if protocol > 2 else name.rpartition(".")[2]  # some modules had other names
    assert f"{hostile} is refused" in str(refused.value)
    assert wanted in str(refused.value)
    assert not marker.exists()


def test_the_attack_works_on_a_reader_that_is_not_restricted(marker):
    pickle.loads(pickle.dumps(ATTACKS["posix.system"](marker)))
    assert marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        b"numpy\nload",
        b"numpy\nndarray.tofile",
        b"numpy.core.multiarray\nfromfile",
        b"numpy._core.numeric\nfromfile",
        b"_codecs\ndecode",
        b"copyreg\n_reconstructor",
        b"halp.data.pickles\nload_pickle",
    ],
)
def test_neighbours_of_what_arrays_need_are_refused(tmp_path, name):
    file = tmp_path / "file"
    file.write_bytes(b"c" + name + b"\n.")
    with pytest.raises(DataError, match="asks for '" + name.decode().replace("\n", r"\.")):
        load_pickle(file)


@pytest.mark.parametrize(
    "name", [b"numpy\ndtype", b"numpy\nndarray", b"numpy.core.multiarray\n_reconstruct",
             b"numpy.core.multiarray\nscalar", b"numpy.core.numeric\n_frombuffer",
             b"_codecs\nencode"],
)  # fmt: skip
def test_a_pickle_cannot_change_the_stand_ins(tmp_path, name):
    content = {"data": numpy.arange(3), "labels": [numpy.int64(1)]}
    write(tmp_path / "honest", content, protocol=2)
    # The class itself is given a state, which would set its attributes, for every later file.
    hostile = tmp_path / "hostile"
    hostile.write_bytes(b"c" + name + b"\nN}U\x05arrayU\x01xs\x86b.")
    with pytest.raises(DataError):
        load_pickle(hostile)
    honest = load_pickle(tmp_path / "honest")
    assert honest["data"].array().tolist() == [0, 1, 2]
    assert honest["labels"][0].number() == 1


def test_bytes_are_not_encoded_otherwise(tmp_path):
    (tmp_path / "file").write_bytes(pickle.dumps(Calls(_encode, "x", "rot13"), 2))
    with pytest.raises(DataError, match="encodes bytes as 'rot13'"):
        load_pickle(tmp_path / "file")


_encode = __import__("_codecs").encode


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_come_as_they_were(tmp_path, protocol):
    arrays = [
        numpy.arange(6, dtype=numpy.uint8).reshape(2, 3),
        numpy.arange(6, dtype=">i4"),
        numpy.asfortranarray(numpy.arange(6.0).reshape(3, 2)),
    ]
    write(tmp_path / "file", arrays, protocol)
    for array, stored in zip(arrays, load_pickle(tmp_path / "file"), strict=True):
        numpy.testing.assert_array_equal(stored.array(), array, strict=True)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="absent"):
        load_pickle(tmp_path / "absent")


def test_builtins_are_not_reached_by_any_name(tmp_path):
    for name in dir(builtins):
        (tmp_path / "file").write_bytes(f"cbuiltins\n{name}\n.".encode())
        with pytest.raises(DataError, match="is refused"):
            load_pickle(tmp_path / "file")


def test_a_name_with_control_characters_stays_one_line(tmp_path):
    (tmp_path / "file").write_bytes(b"\x80\x04\x8c\x02\n\x1b\x8c\x01\n\x93.")
    with pytest.raises(DataError) as refused:
        load_pickle(tmp_path / "file")
    assert r"asks for '\n\x1b.\n'" in str(refused.value)
