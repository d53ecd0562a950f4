"""Claims about what messages quote."""

import numpy
import pytest
import torch

from halp.messages import quoted, reason_of, shortened


@pytest.mark.parametrize("value", ["", "in IN", "two  spaces", "a\tb\n", 3, None, [1, 2], b"\0"])
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
