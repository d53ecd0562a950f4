"""Claims about padded sequences."""

import pytest
import torch

from halp.data import IGNORED, DataError, trim_padding
from halp.data.sequences import pad_sequences

WORDS = torch.tensor([[3, 4, 0, 0], [5, 6, 7, 0]])
TAGS = torch.tensor([[0, 1, IGNORED, IGNORED], [1, 1, 0, IGNORED]])


def test_sequences_fill_rows_and_padding_the_rest():
    padded = pad_sequences(torch.tensor([3, 4, 5, 6, 7]), torch.tensor([2, 3]), 4, padding=0)
    assert padded.tolist() == WORDS.tolist()


def test_a_batch_is_cut_to_its_longest_sequence():
    words, tags = trim_padding(WORDS, TAGS, torch.Generator())
    assert words.tolist() == [[3, 4, 0], [5, 6, 7]]
    assert tags.tolist() == [[0, 1, IGNORED], [1, 1, 0]]
    assert words.data_ptr() == WORDS.data_ptr()


def test_only_trailing_columns_go():
    tags = torch.tensor([[IGNORED, IGNORED, 2, IGNORED]])
    assert trim_padding(torch.zeros(1, 4), tags)[1].tolist() == [[IGNORED, IGNORED, 2]]


def test_one_column_always_stays():
    words, tags = trim_padding(WORDS, torch.full((2, 4), IGNORED))
    assert words.shape == tags.shape == (2, 1)


def test_a_batch_without_padding_stays_whole():
    assert trim_padding(WORDS, TAGS.clamp(min=0))[0].shape == (2, 4)


def test_inputs_may_have_features():
    assert trim_padding(torch.zeros(2, 4, 5), TAGS)[0].shape == (2, 3, 5)


def test_nothing_is_drawn():
    generator = torch.Generator()
    before = generator.get_state()
    trim_padding(WORDS, TAGS, generator)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("labels", [torch.zeros(2), torch.zeros(2, 3), torch.zeros(2, 4, 1)])
def test_labels_of_another_shape_are_refused(labels):
    with pytest.raises(DataError, match=r"inputs of shape \(2, 4\) and labels of shape"):
        trim_padding(WORDS, labels)
