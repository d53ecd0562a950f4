"""Claims about the file of the prepared corpus, and about the data set that is read from it."""

import dataclasses
import os
from pathlib import Path

import numpy
import pytest
import torch

from halp.data import IGNORED, DataError, load_conll2000, units
from halp.data.conll2000 import FILE, TaggedCorpus, TaggedWords, read_corpus, write_corpus


def words(indices, tags, lengths) -> TaggedWords:
    return TaggedWords(
        numpy.array(indices, numpy.int32), numpy.array(tags, numpy.int8), numpy.array(lengths)
    )


CORPUS = TaggedCorpus(
    train=words([2, 3, 4, 2], [0, 1, 1, 0], [3, 1]),
    test=words([4, 1, 1, 2], [1, 0, 1, 0], [4]),
    vocabulary=numpy.array(["<pad>", "<unk>", "the", "café", "widen"]),
    tag_names=numpy.array(["DET", "NOUN"]),
)


def refusal(*folders: Path) -> str:
    with pytest.raises(DataError) as refused:
        load_conll2000(*folders)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_sentences_are_padded_to_the_longest_of_both_parts(tmp_path):
    write_corpus(CORPUS, tmp_path / "conll2000")
    data = load_conll2000(tmp_path)
    assert data.train_inputs.tolist() == [[2, 3, 4, 0], [2, 0, 0, 0]]
    assert data.train_labels.tolist() == [[0, 1, 1, IGNORED], [0, IGNORED, IGNORED, IGNORED]]
    assert data.test_inputs.tolist() == [[4, 1, 1, 2]]
    assert data.test_labels.tolist() == [[1, 0, 1, 0]]
    assert data.train_inputs.dtype == data.train_labels.dtype == torch.int64
    assert (data.name, data.n_classes, data.n_words) == ("conll2000", 2, 5)


def test_what_was_written_is_read(tmp_path):
    corpus = read_corpus(write_corpus(CORPUS, tmp_path))
    for part in ("train", "test"):
        for field in ("words", "tags", "lengths"):
            numpy.testing.assert_array_equal(
                getattr(getattr(corpus, part), field),
                getattr(getattr(CORPUS, part), field),
                strict=True,
            )
    assert corpus.vocabulary.tolist() == CORPUS.vocabulary.tolist()
    assert corpus.tag_names.tolist() == CORPUS.tag_names.tolist()


def test_the_same_corpus_is_written_as_the_same_bytes(tmp_path):
    first, second = write_corpus(CORPUS, tmp_path / "a"), write_corpus(CORPUS, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("place", ["conll2000", "."])
def test_the_file_is_found_in_both_places_of_every_folder(tmp_path, place):
    write_corpus(CORPUS, tmp_path / "second" / place)
    assert load_conll2000(tmp_path / "first", tmp_path / "second").n_words == 5


def test_the_first_folder_that_has_the_file_counts(tmp_path):
    shorter = dataclasses.replace(CORPUS, train=CORPUS.test)
    write_corpus(shorter, tmp_path / "first")
    write_corpus(CORPUS, tmp_path / "second" / "conll2000")
    assert len(load_conll2000(tmp_path / "first", tmp_path / "second").train_labels) == 1


def test_nothing_prepared_gives_the_command_that_does(tmp_path):
    message = refusal(tmp_path / "a", tmp_path / "b")
    assert f"CoNLL-2000 is not in {tmp_path / 'a'} or {tmp_path / 'b'}" in message
    assert "`python utils/postag_data_utils.py`" in message


# Writing.


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    before = write_corpus(CORPUS, tmp_path).read_bytes()

    def fail(stream, **arrays):
        stream.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(numpy, "savez_compressed", fail)
    with pytest.raises(DataError, match=r"cannot be written.*--output.*no space left"):
        write_corpus(CORPUS, tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    assert os.listdir(tmp_path) == [FILE]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written, name another folder with --output"):
        write_corpus(CORPUS, tmp_path / "file" / "conll2000")


# Foreign and damaged files.


def arrays_of(file: Path) -> dict:
    with numpy.load(file) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("changes, complaint", [
    ({"version": numpy.array(2)}, "has format version 2, but this halp reads 1"),
    ({"version": numpy.array([1])}, "its version is int64 of shape (1,)"),
    ({"version": numpy.array("1")}, "its version is <U1"),
    ({"train_words": numpy.array([2, 3, 4, 0])}, "train_words do not lie in 1 ... 4"),
    ({"train_words": numpy.array([2, 3, 4, 5])}, "train_words do not lie in 1 ... 4"),
    ({"train_words": numpy.array([2, 3, 4])}, "train has 3 words, 4 tags and 4 tokens"),
    ({"train_words": numpy.zeros((2, 2), int)}, "train_words is int64 of shape (2, 2)"),
    ({"train_words": numpy.ones(4)}, "train_words is float64"),
    ({"test_tags": numpy.array([0, 0, 0, 2])}, "test_tags do not lie in 0 ... 1"),
    ({"test_tags": numpy.array([0, 0, 0, -1])}, "test_tags do not lie in 0 ... 1"),
    ({"test_lengths": numpy.array([3])}, "test has 4 words, 4 tags and 3 tokens"),
    ({"test_lengths": numpy.array([4, 0])}, "test_lengths do not lie in 1 ... 4"),
    ({"test_lengths": numpy.array([], int)}, "test_lengths is int64 of shape (0,)"),
    ({"vocabulary": numpy.array(["a", "b", "c", "d", "e"])}, "does not begin with <pad> and <unk>"),
    ({"vocabulary": numpy.arange(5)}, "vocabulary is int64"),
    ({"tag_names": numpy.array(["DET", None])}, "allow_pickle=False"),
])  # fmt: skip
def test_a_file_with_other_content_is_refused(tmp_path, changes, complaint):
    file = write_corpus(CORPUS, tmp_path)
    numpy.savez(file, **(arrays_of(file) | changes))
    message = refusal(tmp_path)
    assert complaint in message
    assert str(file) in message
    assert "write it anew with `python utils/postag_data_utils.py`" in message


@pytest.mark.parametrize("name", ["version", "train_words", "test_tags", "vocabulary"])
def test_a_file_that_lacks_something_is_refused(tmp_path, name):
    file = write_corpus(CORPUS, tmp_path)
    arrays = arrays_of(file)
    del arrays[name]
    numpy.savez(file, **arrays)
    assert f"{file} is damaged" in refusal(tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    file = write_corpus(CORPUS, tmp_path)
    whole = file.read_bytes()
    for keep in range(0, len(whole), 20):
        file.write_bytes(whole[:keep])
        assert f"{file} is damaged" in refusal(tmp_path)


def test_a_flipped_byte_is_never_a_wrong_corpus_or_a_traceback(tmp_path):
    file = write_corpus(CORPUS, tmp_path)
    whole, expected = file.read_bytes(), load_conll2000(tmp_path)
    for position in range(0, len(whole), 7):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            data = load_conll2000(tmp_path)
        except DataError:
            continue
        assert torch.equal(data.train_inputs, expected.train_inputs)
        assert torch.equal(data.test_labels, expected.test_labels)


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"\x80\x04N."])
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    assert "is damaged or no prepared CoNLL-2000" in refusal(tmp_path)


def test_a_single_array_is_refused(tmp_path):
    with (tmp_path / FILE).open("wb") as stream:
        numpy.save(stream, numpy.arange(3))
    assert "it is a single array" in refusal(tmp_path)


def test_labels_that_count_are_the_tokens(tmp_path):
    write_corpus(CORPUS, tmp_path)
    data = load_conll2000(tmp_path)
    assert (units(data.train_labels), units(data.test_labels)) == (4, 4)
    assert ((data.train_inputs == 0) == (data.train_labels == IGNORED)).all()


def test_another_corpus_is_not_overwritten(tmp_path):
    shorter = dataclasses.replace(CORPUS, test=CORPUS.train)
    before = write_corpus(shorter, tmp_path).read_bytes()
    with pytest.raises(DataError, match=r"conll2000.npz is there already, holds another corpus"):
        write_corpus(CORPUS, tmp_path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def test_the_same_corpus_stays_as_it_is(tmp_path):
    file = write_corpus(CORPUS, tmp_path)
    with numpy.load(file) as arrays:
        numpy.savez(file.with_suffix(""), **arrays)  # as another version may have packed it
    before = file.read_bytes()
    assert write_corpus(CORPUS, tmp_path) == file
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


@pytest.mark.parametrize("content", [b"", b"a user's own"])
def test_something_else_under_its_name_is_not_overwritten(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(DataError, match=r"no prepared CoNLL-2000: move it away and write it anew"):
        write_corpus(CORPUS, tmp_path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [content]


def test_a_file_in_the_place_of_the_folder_is_the_reason_that_is_given(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match=r"cannot be written, name another folder with --output"):
        write_corpus(CORPUS, tmp_path / "taken")
