"""Claims about the loader of data in memory."""

import math

import pytest
import torch

from halp.data import IGNORED, Batches, DataError, crop_and_flip, trim_padding
from halp.optim import SVRG
from halp.optim.preserve import generators_of, preserved


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


def test_no_data_is_refused():
    with pytest.raises(DataError, match="no samples"):
        Batches(torch.zeros(0, 2), torch.zeros(0), batch_size=4)


def test_differing_numbers_of_inputs_and_labels_are_refused():
    with pytest.raises(DataError, match="3 inputs but 2 labels"):
        Batches(torch.zeros(3, 2), torch.zeros(2), batch_size=4)


# Transforms.


def add_noise(inputs, labels, generator):
    return inputs + torch.rand(inputs.shape, generator=generator), labels


def contents(iteration) -> list[torch.Tensor]:
    return [inputs for inputs, _ in iteration]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def test_a_transform_sees_every_batch():
    def negate(inputs, labels, generator):
        return -inputs, labels + 100

    plain, transformed = list(make()), list(make(transform=negate))
    for (inputs, labels), (negative, shifted) in zip(plain, transformed, strict=True):
        assert torch.equal(negative, -inputs)
        assert torch.equal(shifted, labels + 100)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_transform_draws_anew_in_every_iteration_and_the_seed_decides(shuffle):
    def two_iterations(seed):
        batches = make(shuffle=shuffle, seed=seed, transform=add_noise)
        return contents(batches), contents(batches)

    first, second = two_iterations(seed=1)
    assert not same(first, second)
    assert same([*first, *second], [x for part in two_iterations(seed=1) for x in part])
    assert not same(first, two_iterations(seed=2)[0])


def test_a_transform_does_not_change_the_first_order():
    assert order_of(make(rows=50, shuffle=True)) == order_of(
        make(rows=50, shuffle=True, transform=add_noise)
    )


def test_only_batches_that_draw_have_a_generator():
    assert make().generator is None
    assert make(shuffle=True).generator is not None
    assert make(transform=trim_padding).generator is not None


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_nested_iteration_does_not_change_what_a_transform_still_draws(shuffle):
    undisturbed = make(shuffle=shuffle, transform=add_noise)
    expected = contents(undisturbed)
    batches = make(shuffle=shuffle, transform=add_noise)
    outer = iter(batches)
    begun = contents([next(outer)])
    list(batches)
    assert same(begun + contents(outer), expected)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_nested_iteration_under_preserved_generators_leaves_no_trace(shuffle):
    undisturbed = make(shuffle=shuffle, transform=add_noise)
    expected = contents(undisturbed) + contents(undisturbed)
    batches = make(shuffle=shuffle, transform=add_noise)
    outer = iter(batches)
    seen = contents([next(outer)])
    with preserved([], generators_of(batches)):
        list(batches)
    seen += contents(outer) + contents(batches)
    assert same(seen, expected)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_snapshot_in_the_middle_of_an_epoch_leaves_augmented_batches_unchanged(shuffle):
    images, targets = torch.rand(10, 1, 6, 6), torch.rand(10, 1)

    def epochs(snapshots: bool) -> list[torch.Tensor]:
        batches = Batches(images, targets, 3, shuffle=shuffle, transform=crop_and_flip)
        model = torch.nn.Linear(36, 1)
        optimizer = SVRG(model.parameters(), lr=0.1, T=2)

        def loss_of(x, y):
            optimizer.zero_grad()
            loss = (model(x.flatten(1)) - y).square().mean()
            loss.backward()
            return loss

        seen = []
        for _ in range(3):
            for inputs, _ in batches:
                if snapshots:
                    optimizer.snapshot(batches, loss_of)
                seen.append(inputs)
        return seen

    with_snapshots, without = epochs(True), epochs(False)
    assert same(with_snapshots, without)
    assert not same(without[:4], without[4:8])  # every epoch has crops of its own


def test_a_transform_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(make(transform=add_noise, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_of_sequences_are_cut_to_their_longest():
    labels = torch.tensor([[0, IGNORED, IGNORED], [0, 0, IGNORED], [0, 0, 0]])
    batches = Batches(labels.clamp(min=0), labels, batch_size=2, transform=trim_padding)
    assert [tuple(words.shape) for words, _ in batches] == [(2, 2), (1, 3)]


def test_of_one_dimension_the_wrong_number_and_its_row_are_named():
    with pytest.raises(DataError, match=r"the inputs of batch 0 hold nan in row 1 \(row 1 of"):
        Batches(torch.tensor([1.0, float("nan"), 2.0]), torch.zeros(3), 2)


def test_labels_are_checked_as_inputs_are():
    labels = torch.tensor([[0.0, 1.0], [1.0, float("inf")], [0.0, 0.0]])
    with pytest.raises(DataError, match=r"the labels of batch 1 hold inf in row 0 \(row 1 of"):
        Batches(torch.zeros(3, 2), labels, 1)


def test_what_has_no_rows_is_refused_in_short():
    for inputs in (torch.ones(()), [[0.0] * 1000] * 3):
        with pytest.raises(DataError, match="the inputs must") as refused:
            Batches(inputs, torch.zeros(3), 1)
        assert len(str(refused.value)) < 200
