"""Downloads, whoever carries them out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

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
