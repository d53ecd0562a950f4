"""Pickles for tests: files in CIFAR-10's layout, as Python 2 and 3 write them, and hostile ones."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy


def cifar_content(rows: int, seed: int = 0) -> dict:
    """Random pixels and labels, under the names of a CIFAR-10 file."""
    random = numpy.random.default_rng(seed)
    return {
        "batch_label": f"random batch {seed}",
        "labels": random.integers(0, 10, rows).tolist(),
        "data": random.integers(0, 256, (rows, 3072), dtype=numpy.uint8),
        "filenames": [f"{row}.png" for row in range(rows)],
    }


def write(file: Path, content: object, protocol: int = 4) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(content, protocol))


def python2_pickle(content: dict) -> bytes:
    """The bytes that Python 2's cPickle writes of a CIFAR-10 file: protocol 2, str as bytes."""
    data, labels = content["data"], content["labels"]
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + b"(K\x01"
        + b"J%bJ%b\x86" % tuple(struct.pack("<i", size) for size in data.shape)
        + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + b"T%b%btb" % (struct.pack("<i", data.size), data.tobytes())
    )
    numbers = b"](" + b"".join(b"K%c" % label for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


class Calls:
    """Pickles as a call of a function, which unpickling would carry out."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call
