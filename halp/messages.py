"""Parts of messages."""

from typing import Any


def quoted(value: Any, most: int = 80) -> str:
    """Return ``repr(value)``, cut where it would be longer than so many characters.

    Whatever comes out of a file or from a user may be of any length.
    """
    text = repr(value)
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}… ({len(text)} characters)"


def in_one_line(text: str, most: int = 400) -> str:
    """Return a text without line breaks, cut where it is longer than so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
