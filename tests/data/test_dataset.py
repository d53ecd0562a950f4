"""Claims about what a loaded data set is."""

import dataclasses
import inspect

import pytest
import torch

from halp.data import IGNORED, DataError, Dataset, units


def make(**changes) -> Dataset:
    parts = {
        "name": "toy",
        "train_inputs": torch.arange(24.0).view(4, 1, 2, 3),
        "train_labels": torch.tensor([0, 2, 1, 2]),
        "test_inputs": torch.zeros(2, 1, 2, 3),
        "test_labels": torch.tensor([1, 0]),
        "n_classes": 3,
    }
    return Dataset(**(parts | changes))


def test_the_shape_is_that_of_one_input():
    assert make().input_shape == (1, 2, 3)
    assert make().n_features == 6


def test_first_keeps_the_first_training_samples_and_all_test_samples():
    data = make().first(3)
    assert torch.equal(data.train_inputs, make().train_inputs[:3])
    assert data.train_labels.tolist() == [0, 2, 1]
    assert len(data.test_labels) == 2


def test_first_of_more_than_there_are_keeps_all():
    assert len(make().first(100).train_labels) == 4


def test_first_of_none_is_refused():
    with pytest.raises(DataError, match="at least 1 training sample"):
        make().first(0)


def test_to_casts_inputs_but_not_labels():
    data = make().to("cpu", torch.float64)
    assert data.train_inputs.dtype == data.test_inputs.dtype == torch.float64
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64


def test_a_label_outside_the_classes_is_refused_with_its_value_and_row():
    with pytest.raises(DataError, match=r"0 \.\.\. 1 \(2 classes\).*the label in row 1 is 2"):
        dataclasses.replace(make(), n_classes=2)


def test_a_negative_test_label_is_refused_too():
    with pytest.raises(DataError, match=r"the test labels of toy.*row 1 is -1"):
        make(test_labels=torch.tensor([0, -1]))


def test_more_classes_than_labels_are_accepted():
    assert dataclasses.replace(make(), n_classes=12).n_classes == 12


def test_no_classes_are_refused():
    with pytest.raises(DataError, match="at least 1, not 0"):
        make(n_classes=0)


@pytest.mark.parametrize("part", ["train", "test"])
def test_an_empty_part_is_refused(part):
    empty = {f"{part}_inputs": torch.zeros(0, 6), f"{part}_labels": torch.zeros(0)}
    with pytest.raises(DataError, match="samples"):
        make(**empty)


def test_differing_numbers_of_inputs_and_labels_are_refused():
    with pytest.raises(DataError, match="4 training inputs but 3 training labels"):
        make(train_labels=torch.tensor([0, 1, 2]))


def test_labels_that_are_no_int64_are_refused():
    with pytest.raises(DataError, match="the training labels of toy must be int64, not float32"):
        make(train_labels=torch.tensor([0.0, 2.0, 1.0, 2.0]))


# Sequences.


def sequences(**changes) -> Dataset:
    parts = {
        "name": "toy",
        "train_inputs": torch.tensor([[3, 4, 0], [2, 0, 0], [1, 2, 3]]),
        "train_labels": torch.tensor([[0, 1, IGNORED], [1, IGNORED, IGNORED], [0, 0, 0]]),
        "test_inputs": torch.tensor([[4, 0]]),
        "test_labels": torch.tensor([[1, IGNORED]]),
        "n_classes": 2,
        "n_words": 5,
    }
    return Dataset(**(parts | changes))


def test_the_label_of_padding_is_the_one_that_cross_entropy_ignores():
    default = inspect.signature(torch.nn.functional.cross_entropy).parameters["ignore_index"]
    assert IGNORED == default.default


def test_units_are_the_labels_that_count():
    assert units(sequences().train_labels) == 6
    assert units(make().train_labels) == 4
    assert units(torch.tensor([IGNORED, IGNORED])) == 0


def test_indices_of_words_keep_their_dtype():
    data = sequences().to("cpu", torch.float64)
    assert data.train_inputs.dtype == data.test_inputs.dtype == torch.int64
    assert torch.equal(data.train_inputs, sequences().train_inputs)
    assert data.n_words == 5


def test_first_keeps_whole_sequences():
    data = sequences().first(2)
    assert data.train_inputs.tolist() == [[3, 4, 0], [2, 0, 0]]
    assert data.n_words == 5


def test_a_label_of_padding_outside_sequences_is_refused():
    with pytest.raises(DataError, match=f"the label in row 2 is {IGNORED}"):
        make(train_labels=torch.tensor([0, 2, IGNORED, 2]))


def test_a_sequence_in_which_no_label_counts_is_refused():
    labels = sequences().train_labels.clone()
    labels[1, 0] = IGNORED
    with pytest.raises(DataError, match="in every row, but not in row 1"):
        sequences(train_labels=labels)


@pytest.mark.parametrize("label", [-1, 2, -99])
def test_a_label_of_a_sequence_outside_the_classes_is_refused_with_its_place(label):
    labels = sequences().train_labels.clone()
    labels[2, 1] = label
    with pytest.raises(DataError, match=rf"0 \.\.\. 1 .* in row 2, column 1 is {label}"):
        sequences(train_labels=labels)


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_the_vocabulary_is_refused_with_its_place(index):
    with pytest.raises(
        DataError, match=rf"the test inputs .* 0 \.\.\. 4 \(5 words\).* row 0, column 1 is {index}"
    ):
        sequences(test_inputs=torch.tensor([[4, index]]))


def test_words_that_are_no_indices_are_refused():
    with pytest.raises(DataError, match=r"indices of words.*not float32 of shape \(1, 2\)"):
        sequences(test_inputs=torch.zeros(1, 2))


def test_sequences_of_features_need_no_vocabulary():
    data = sequences(
        train_inputs=torch.rand(3, 3, 7), test_inputs=torch.rand(1, 2, 7), n_words=None
    )
    assert data.to("cpu", torch.float64).train_inputs.dtype == torch.float64


def test_labels_that_do_not_go_with_the_sequences_are_refused():
    with pytest.raises(DataError, match=r"shape \(1, 2\), which does not go with .*\(1, 3\)"):
        sequences(test_labels=torch.tensor([[1, 0, 0]]))


def test_labels_of_three_dimensions_are_refused():
    with pytest.raises(DataError, match=r"1 or 2 dimensions, not shape \(1, 2, 1\)"):
        sequences(test_labels=torch.zeros(1, 2, 1, dtype=torch.int64))


def test_an_empty_vocabulary_is_refused():
    with pytest.raises(DataError, match="the number of words must be at least 1, not 0"):
        sequences(n_words=0)
