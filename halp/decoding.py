"""Text files, whatever wrote them: their encoding, their byte-order marks and their line ends."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

# The longer ones first: UTF-32's little-endian mark begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_MARK = "\ufeff"


class TextError(ValueError):
    """A text that can be read in more than one way, or in none; the message names the line."""


def lines_of(content: bytes, place: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text without their ends, each after where it is.

    The encoding is the one that a byte-order mark says, else UTF-8; marks are no part of the text,
    also where files that had them were put together. Lines end with ``\\n``, ``\\r\\n`` (or more
    than one ``\\r``, which are left by converting twice), or all of them with ``\\r``. The last
    line need not end; after a line end at the very end comes one more, empty line.

    Args:
        content: of the file.
        place: the file's name, for messages.

    Raises:
        TextError: bytes that are not of that encoding, a NUL character, or a carriage return in
            the middle of a line of a text whose lines end with ``\\n``.
    """
    text = _decoded(content, place)
    for number, line in enumerate(_split(text), 1):
        where = f"{place}, line {number}"
        line = line.lstrip(_MARK)
        if "\0" in line:
            raise TextError(
                f"{where}: there is a NUL character, so the file is damaged, or in UTF-16 without "
                "a byte-order mark: save it as UTF-8"
            )
        if "\r" in line:
            raise TextError(
                f"{where}: there is a carriage return in the middle, while other lines end with a "
                "line feed: give all lines the same end"
            )
        yield where, line


def _decoded(content: bytes, place: str) -> str:
    mark, encoding = next((each for each in _MARKS if content.startswith(each[0])), (b"", "utf-8"))
    body = content[len(mark) :]
    try:
        return body.decode(encoding)
    except UnicodeDecodeError as error:
        line = len(_split(body[: error.start].decode(encoding)))
        wrong = " ".join(f"0x{byte:02x}" for byte in body[error.start : error.end][:4])
        raise TextError(
            f"{place}, line {line}: {'the byte' if len(wrong) == 4 else 'the bytes'} {wrong} "
            f"{'is' if len(wrong) == 4 else 'are'} not {encoding.upper()}"
            f"{'' if mark else ': save the file as UTF-8'}"
        ) from error


def _split(text: str) -> list[str]:
    if "\n" not in text:
        return text.split("\r")
    return [line.rstrip("\r") for line in text.split("\n")]
