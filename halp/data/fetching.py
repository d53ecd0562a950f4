"""Downloads, whoever carries them out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from halp.messages import in_one_line

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


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Within the block, what is printed goes to stderr: stdout belongs to the results."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def reason_of(error: Exception) -> str:
    """What an error says, in one line."""
    return in_one_line(str(error)) or type(error).__name__
