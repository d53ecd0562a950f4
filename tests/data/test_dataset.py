"""Claims about what a loaded data set is."""

import dataclasses

import pytest
import torch

from halp.data import DataError, Dataset


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
