"""Messages stay short, whatever they quote."""

from halp.messages import in_one_line, quoted


def test_what_is_short_is_quoted_whole():
    assert quoted("a 'word'") == repr("a 'word'")
    assert quoted(0.25) == "0.25"


def test_what_is_long_is_cut_and_its_length_said():
    text = quoted("x" * 300_000)
    assert text == "'" + 78 * "x" + "… (300002 characters)"


def test_long_reasons_become_one_short_line():
    assert in_one_line("two\n  lines") == "two lines"
    assert len(in_one_line("word " * 10_000)) == 400
