"""Files that are whole or absent whatever happens to their writer, and a lock on a folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

UNFINISHED = ".unfinished"
"""End of the names of files while they are written; a killed process leaves them behind."""

LOCK = ".lock"
"""File in a folder that its writer holds locked."""

SEAL = b"halp checkpoint, version 1"
"""How sealed files begin."""


class DamagedError(ValueError):
    """A sealed file that does not hold what was once written."""


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Make ``path`` a file of these bytes, or leave everything as it was.

    They are written beside it, synced to the disk and renamed, so that nobody ever sees half of
    them, not even after a power cut.

    Raises:
        OSError: the disk is full, the folder is not there, …
    """
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):  # what went wrong above is what matters
            unfinished.unlink(missing_ok=True)
    _sync(path.parent)


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what killed writers of ``name`` (a pattern) have left in a folder."""
    for leftover in folder.glob(f".{name}{UNFINISHED}"):
        leftover.unlink(missing_ok=True)


def write_sealed(path: Path, content: bytes | memoryview) -> None:
    """`write_whole` with a header that tells any damage: length and SHA-256 of the content."""
    write_whole(path, _header(content), content)


def read_sealed(path: Path) -> memoryview:
    """Return the content of a file of `write_sealed`.

    Raises:
        DamagedError: a byte of it is another, or it has lost or gained some.
        OSError: it cannot be read.
    """
    return unsealed(path.read_bytes())


def unsealed(file: bytes) -> memoryview:
    """Return the content of such a file that has been read.

    Raises:
        DamagedError: a byte of it is another, or it has lost or gained some.
    """
    length = len(_header(b""))
    content = memoryview(file)[length:]
    if file[:length] == _header(content):
        return content
    if not file.startswith(SEAL):
        raise DamagedError("it does not begin as a checkpoint of this version")
    raise DamagedError("its content is not what its checksum says")


def _header(content: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    return b"%s\n%20d bytes, SHA-256 %s\n" % (SEAL, len(content), digest.encode())


def _sync(folder: Path) -> None:
    """Make a rename in a folder last."""
    if sys.platform == "win32":  # no folder can be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder for the length of the block.

    The lock is the process's own: it ends with it, however that ends.

    Raises:
        BlockingIOError: the folder is locked already.
        OSError: the folder cannot be written.
    """
    with (folder / LOCK).open("ab") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def is_locked(folder: Path) -> bool:
    """Whether somebody is in a `locked` block of a folder; the folder is not written to."""
    if not (folder / LOCK).exists():
        return False
    try:
        with locked(folder):
            return False
    except BlockingIOError:
        return True
