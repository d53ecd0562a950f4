"""What messages quote of what a person or a file wrote: on one line, and never at length."""

from __future__ import annotations

QUOTED = 80
"""Characters of a value that a message quotes."""

SAID = 400
"""Characters of another library's message that ours repeats."""

WHOLE = 2000
"""Characters of a whole message on a command line, where names of files are long."""


def quoted(value: object) -> str:
    """Return ``repr(value)`` on one line; of a long one the beginning, and how long it is."""
    if isinstance(value, str):  # cut before it is quoted, whose spaces stay what they are
        return repr(value[:QUOTED]) + _rest(len(value), QUOTED)
    return shortened(repr(value))


def shortened(text: object, limit: int = QUOTED) -> str:
    """Return ``str(text)`` on one line; of a long one the beginning, and how long it is."""
    line = " ".join(str(text).split())
    return line[:limit] + _rest(len(line), limit)


def reason_of(error: BaseException) -> str:
    """Return what an error says, on one line."""
    said = getattr(error, "strerror", None) or str(error)
    return shortened(said, SAID) or type(error).__name__


def _rest(length: int, limit: int) -> str:
    return "" if length <= limit else f"… ({length} characters)"
