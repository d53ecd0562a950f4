"""Downloads, whoever carries them out; nothing that is there is ever replaced by one."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# What torchvision and nltk raise for a failed download, an unreadable folder, and a damaged file.
FETCHING_ERRORS = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
)


UNFINISHED = ".halp-"
"""How the names of folders begin into which a download is under way, or was when it was killed."""


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Within the block, what is printed goes to stderr: stdout belongs to the results."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """A new folder from which things can be moved to ``target``; it is gone after the block.

    Raises:
        OSError: no folder can be made there.
    """
    there = next(folder for folder in target.absolute().parents if folder.is_dir())
    with tempfile.TemporaryDirectory(".unfinished", UNFINISHED, there) as folder:
        yield Path(folder)


def move_where_nothing_is(source: Path, target: Path) -> None:
    """Move a file or a folder to where there is nothing, or an empty folder for a folder.

    Raises:
        OSError: something is there, which stays as it is; or nothing can be written there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        os.rename(source, target)  # takes the place of no file, and of no folder but an empty one
        return
    try:
        os.link(source, target)  # unlike a rename, which would take a file's place
    except FileExistsError:
        raise
    except OSError as error:  # a file system without links
        if os.path.lexists(target):
            raise FileExistsError(f"{target} exists already") from error
        os.rename(source, target)
    else:
        source.unlink()
