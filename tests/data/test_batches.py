"""Claims about the loader of data in memory."""

import math

import pytest
import torch

from halp.data import Batches, DataError


def make(rows: int = 10, batch_size: int = 4, **options) -> Batches:
    return Batches(
        torch.arange(rows * 2.0).view(rows, 2), torch.arange(rows), batch_size, **options
    )


def order_of(batches) -> list[int]:
    return [int(label) for _, labels in batches for label in labels]


def test_batches_come_in_file_order_and_the_short_last_one_is_kept():
    batches = make(rows=10, batch_size=4)
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(batches) == 3


@pytest.mark.parametrize("rows, batch_size, length", [(8, 4, 2), (9, 4, 3), (1, 4, 1), (3, 100, 1)])
def test_length_is_the_number_of_batches(rows, batch_size, length):
    batches = make(rows, batch_size)
    assert len(batches) == len(list(batches)) == length


@pytest.mark.parametrize("shuffle", [False, True])
def test_inputs_and_labels_stay_together(shuffle):
    for inputs, labels in make(rows=50, batch_size=7, shuffle=shuffle):
        assert torch.equal(inputs[:, 0], 2.0 * labels)


def test_a_shuffled_iteration_visits_every_row_once_and_each_one_differs():
    batches = make(rows=50, shuffle=True)
    first, second = order_of(batches), order_of(batches)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


def test_the_seed_decides_the_orders():
    def orders(seed):
        batches = make(rows=50, shuffle=True, seed=seed)
        return [order_of(batches) for _ in range(3)]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)


@pytest.mark.parametrize("shuffle", [False, True])
def test_iterating_leaves_the_global_random_state_alone(shuffle):
    batches = make(shuffle=shuffle)
    before = torch.get_rng_state()
    order_of(batches)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_order_is_drawn_when_an_iteration_begins():
    expected = make(rows=50, shuffle=True)
    first_order, second_order = order_of(expected), order_of(expected)
    batches = make(rows=50, shuffle=True)
    first, second = iter(batches), iter(batches)
    assert order_of(second) == second_order
    assert order_of(first) == first_order


def test_restoring_the_generator_after_a_nested_iteration_leaves_later_orders_unchanged():
    undisturbed = make(rows=50, shuffle=True)
    expected = [order_of(undisturbed), order_of(undisturbed)]
    batches = make(rows=50, shuffle=True)
    outer = iter(batches)
    state = batches.generator.get_state()
    order_of(batches)
    batches.generator.set_state(state)
    assert [order_of(outer), order_of(batches)] == expected


def test_batches_are_slices_of_the_data_in_file_order():
    batches = make()
    inputs, _ = next(iter(batches))
    assert inputs.data_ptr() == batches.inputs.data_ptr()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_input_that_is_no_finite_number_is_refused_with_its_batch_and_row(value):
    inputs = torch.zeros(10, 2, 3)
    inputs[6, 1, 2] = value
    with pytest.raises(DataError, match=rf"batch 1 hold {value} in row 2 \(row 6 of the data\)"):
        Batches(inputs, torch.zeros(10), batch_size=4)


def test_inputs_of_integers_are_accepted():
    assert len(Batches(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3), batch_size=2)) == 2


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_size_below_one_is_refused(batch_size):
    with pytest.raises(DataError, match=f"at least 1, not {batch_size}"):
        make(batch_size=batch_size)


def test_no_data_is_refused():
    with pytest.raises(DataError, match="no samples"):
        Batches(torch.zeros(0, 2), torch.zeros(0), batch_size=4)


def test_differing_numbers_of_inputs_and_labels_are_refused():
    with pytest.raises(DataError, match="3 inputs but 2 labels"):
        Batches(torch.zeros(3, 2), torch.zeros(2), batch_size=4)
