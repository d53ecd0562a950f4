"""Reading arrays of bytes in MNIST's IDX layout, packed by gzip or not. Nothing is written."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path

import numpy

from halp.data.dataset import DataError
from halp.messages import reason_of

GZIP = b"\x1f\x8b"
"""How packed files begin, whatever their name is."""


def idx_files(file: Path) -> list[Path]:
    """Return in which of its two forms a file is there: unpacked, then ``.gz``."""
    return [form for form in (file, packed_form(file)) if os.path.lexists(form)]


def packed_form(file: Path) -> Path:
    """Return the file's name once it is packed."""
    return file.with_name(f"{file.name}.gz")


def read_idx(file: Path, dimensions: int) -> numpy.ndarray:
    """Read an array of bytes from a file that is there, unpacked or as ``.gz``.

    Args:
        file: its unpacked form, which is read where both are there.
        dimensions: of the array.

    Returns:
        A read-only array, uint8.

    Raises:
        DataError: it is damaged or something else; or the two forms hold different data.
    """
    first, *others = idx_files(file)
    content = _content(first)
    for other in others:
        if not _holds(other, content):
            raise DataError(
                f"{first} and {other.name} beside it hold different data: move away the one that "
                "is not meant"
            )
    try:
        return _array(content, dimensions)
    except ValueError as error:
        raise DataError(_unreadable(first, error)) from error


def _content(file: Path) -> bytes:
    """Return what a file holds, unpacked."""
    try:
        content = file.read_bytes()
        return gzip.decompress(content) if content.startswith(GZIP) else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(_unreadable(file, error)) from error


def _holds(packed: Path, content: bytes) -> bool:
    """Whether a packed file holds that content."""
    checksum = struct.pack("<II", zlib.crc32(content), len(content) % 2**32)
    try:
        if packed.read_bytes()[-len(checksum) :] == checksum:  # how gzip files end
            return True
    except OSError as error:
        raise DataError(_unreadable(packed, error)) from error
    return _content(packed) == content


def _unreadable(file: Path, error: Exception) -> str:
    return f"{file} cannot be read: delete or replace it ({reason_of(error)})"


def _array(content: bytes, dimensions: int) -> numpy.ndarray:
    start = bytes([0, 0, 8, dimensions])  # 8: the type of its numbers is uint8
    header = len(start) + 4 * dimensions
    if content[: len(start)] != start or len(content) < header:
        raise ValueError(f"it does not begin as an IDX file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[len(start) : header])
    try:
        return numpy.frombuffer(content, numpy.uint8, offset=header).reshape(shape)
    except ValueError:
        raise ValueError(
            f"it has {len(content) - header} bytes for an array of shape {shape}"
        ) from None
