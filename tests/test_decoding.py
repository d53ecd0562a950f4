"""Claims about text files from anywhere."""

import codecs

import pytest

from halp.decoding import TextError, lines_of

TEXT = "caf\xe9 NN\n\n\u4e2d IN\nlast"
LINES = ["caf\xe9 NN", "", "\u4e2d IN", "last"]

MARKED = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}


def read(content: bytes) -> list[str]:
    return [line for _, line in lines_of(content, "words.txt")]


def refusal(content: bytes) -> str:
    with pytest.raises(TextError) as refused:
        read(content)
    message = str(refused.value)
    assert "\n" not in message and "\r" not in message
    assert len(message) < 300
    return message


def test_text_without_a_mark_is_utf_8():
    assert read(TEXT.encode()) == LINES


@pytest.mark.parametrize("encoding", MARKED)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n"])
def test_a_byte_order_mark_says_the_encoding_and_is_no_part_of_the_text(encoding, end):
    assert read(MARKED[encoding] + TEXT.replace("\n", end).encode(encoding)) == LINES


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_what_python_writes_is_read(encoding):
    assert read(TEXT.encode(encoding)) == LINES


def test_marks_in_files_that_were_put_together_are_no_part_of_the_text():
    part = codecs.BOM_UTF8 + b"one\n"
    assert read(codecs.BOM_UTF8 + part + part) == ["one", "one", ""]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_end_at_the_end_makes_no_difference_but_an_empty_line(end):
    assert read(f"a{end}b".encode()) == ["a", "b"]
    assert read(f"a{end}b{end}".encode()) == ["a", "b", ""]


def test_characters_that_end_no_line_stay_in_it():
    assert read("a\x0b\x0c\x1c\x85\u2028b\n".encode()) == ["a\x0b\x0c\x1c\x85\u2028b", ""]


def test_lines_are_numbered_from_one():
    assert [where for where, _ in lines_of(b"a\rb", "x")] == ["x, line 1", "x, line 2"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_bytes_of_another_encoding_are_named_with_their_line(end):
    message = refusal(f"one{end}caf\xe9 NN{end}".encode("latin-1"))
    assert message == "words.txt, line 2: the byte 0xe9 is not UTF-8: save the file as UTF-8"


def test_a_text_that_is_not_what_its_mark_says_is_refused():
    message = refusal(codecs.BOM_UTF16_LE + "one\ntwo".encode("utf-16-le") + b"\0")
    assert message.startswith("words.txt, line 2: the byte 0x00 is not UTF-16-LE")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_refused(encoding):
    assert "line 1: there is a NUL character" in refusal("one\r\ntwo".encode(encoding))


def test_a_nul_character_is_refused_with_its_line():
    assert refusal(b"one\ntw\0o\n").startswith("words.txt, line 2: there is a NUL character")


def test_a_carriage_return_within_a_line_is_refused_with_its_line():
    assert "words.txt, line 2: there is a carriage return in the middle" in refusal(b"a\nb\rc\n")
