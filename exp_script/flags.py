"""What the scripts' command lines are made of: parsers, kinds of arguments, refusals."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from halp import formats
from halp.grid import ROUNDINGS
from halp.messages import SAID, quoted, shortened

N = TypeVar("N", int, float)


class UsageError(ValueError):
    """A command line that cannot be carried out; the message is for the person who wrote it."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print its whole usage and end the process."""

    def error(self, message: str) -> NoReturn:
        """Raise the message."""
        raise UsageError(shortened(message, SAID))


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds a flag's default to its help where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def refuse_existing(file: Path, advice: str) -> None:
    """Raise UsageError if there is something where a result is to be written."""
    if os.path.lexists(file):
        raise UsageError(f"{file} exists already and is not overwritten: {advice}")


def any_of(names: Mapping[str, object] | Sequence[str]) -> str:
    """Return names as a choice: a, b or c."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def count(text: str) -> int:
    """Read a whole number from 1."""
    value = _number(int, text, "a whole number of at least 1")
    if value < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, not {value}")
    return value


def seed(text: str) -> int:
    """Read a whole number from 0 that PyTorch takes for a seed."""
    value = _number(int, text, "a whole number of at least 0")
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"it must lie in 0 ... {2**31 - 1}, not {value}")
    return value


def non_negative(text: str) -> float:
    """Read a finite number from 0."""
    value = _number(float, text, "a number of at least 0")
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"it must be a finite number of at least 0, not {value}")
    return value


def positive(text: str) -> float:
    """Read a finite number above 0."""
    value = _number(float, text, "a positive number")
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"it must be a positive finite number, not {value}")
    return value


def scale(text: str) -> str | float:
    """Read ``none``, ``auto`` or a positive number."""
    if text in ("none", "auto"):
        return text
    value = _number(float, text, "none, auto or a positive number")
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"it must be none, auto or positive, not {value}")
    return value


def interval(text: str) -> str:
    """Read a whole number of steps from 1, or of epochs, as in ``2e``."""
    try:
        count(text.removesuffix("e"))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"it must be a number of steps, as in 500, or of epochs, as in 2e, not {quoted(text)}"
        ) from None
    return text


def _number(kind: Callable[[str], N], text: str, wanted: str) -> N:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it must be {wanted}, not {quoted(text)}") from None


def format_name(text: str) -> str:
    """Read the name of a number format."""
    try:
        return formats.get(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rounding(text: str) -> str:
    """Read a rounding mode."""
    if text not in ROUNDINGS:
        raise argparse.ArgumentTypeError(
            f"unknown rounding {quoted(text)}: choose {any_of(ROUNDINGS)}"
        )
    return text
