"""Claims about what messages quote."""

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import halp
from halp import formats
from halp.data import Batches
from halp.messages import quoted, reason_of, shortened
from halp.training import Checkpoint, plot_convergence


@pytest.mark.parametrize(
    "value", ["", "a 'word'", "two  spaces", "a\tb\n", 3, 0.25, None, [1, 2], b"\0"]
)
def test_short_values_are_quoted_whole(value):
    assert quoted(value) == repr(value)


@pytest.mark.parametrize("whole", ["x" * 300_000, "\U0010fffe" * 300_000, "a\r" * 150_000])
def test_of_a_long_string_the_beginning_is_quoted_and_its_length(whole):
    text = quoted(whole)
    assert len(text) < 1000
    assert text.startswith(repr(whole[:80]))
    assert text.endswith("… (300000 characters)")


@pytest.mark.parametrize(
    "value",
    [list(range(10_000)), {"a": "b" * 9999}, torch.zeros(99, 99), numpy.zeros((99, 9)), 9**999],
)
def test_any_value_is_quoted_on_one_line_and_not_at_length(value):
    text = quoted(value)
    assert len(text) < 120
    assert "\n" not in text
    assert text[:5] == repr(value)[:5]


def test_a_text_of_many_lines_becomes_one():
    assert shortened(" two\n  lines\r\n") == "two lines"
    assert shortened("abcdef", 3) == "abc… (6 characters)"


def test_the_reason_of_an_error_is_one_line_or_its_kind():
    assert reason_of(ValueError("a\nb")) == "a b"
    assert reason_of(KeyError()) == "KeyError"
    assert reason_of(OSError(28, "No space left on device", "file")) == "No space left on device"
    assert len(reason_of(ValueError("x" * 10**6))) < 500


# The library's own messages.

LONG = "x" * 100_000


def checkpoint(**parts) -> Checkpoint:
    fields = {"architecture": {"name": "resnet"}, "origin": {}, "model": {}, "momentum": {}}
    return Checkpoint(**(fields | parts))


@pytest.mark.parametrize(
    "refused",
    [
        lambda: formats.get(LONG),
        lambda: formats.get(f"e{'9' * 100_000}m1"),
        lambda: formats.get([LONG]),
        lambda: halp.quantize(torch.ones(2), "fp16", LONG),
        lambda: halp.quantize(torch.ones(2), "fp16", overflow=LONG),
        lambda: halp.quantize(torch.ones(2), "fp16", scale=LONG),
        lambda: halp.quantize(torch.ones(2), "fp16", scale=[LONG]),
        lambda: halp.quantize(torch.ones(2), "fp16", axis=LONG),
        lambda: halp.quantize(torch.ones(2), "fp16", "stoc", random_bits=LONG),
        lambda: plot_convergence({}, Path("figure.png"), quantity=LONG),
        lambda: Batches(torch.ones(2), torch.ones(2), LONG),
        lambda: checkpoint(model={LONG: torch.ones(1)}).load_model(nn.Identity()),
        lambda: checkpoint(momentum={LONG: torch.ones(1)}).load_model(nn.Identity()),
        lambda: checkpoint(architecture={"name": LONG, LONG: LONG}).check_architecture({}, {}),
        lambda: checkpoint().check_architecture({"name": LONG}, {}),
    ],
)
def test_what_was_given_is_not_quoted_at_length(refused):
    with pytest.raises((ValueError, TypeError)) as error:
        refused()
    assert len(str(error.value)) < 1500
    assert "xxxx" in str(error.value) or "999" in str(error.value)


def test_what_a_checkpoint_is_of_is_not_told_at_length():
    assert len(str(checkpoint(origin={"solver": LONG}))) < 600
