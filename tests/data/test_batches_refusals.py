"""Claims about what cannot be cut into batches: each refusal names the cause, value and place."""

import math

import numpy
import pytest
import torch

from halp.data import Batches, DataError


def refusal(*arguments) -> str:
    with pytest.raises(DataError) as refused:
        Batches(*arguments)
    return str(refused.value)


SHAPES = {  # of six rows, with a place in row 4, and how it is called
    (6,): ((4,), ""),
    (6, 3): ((4, 2), " at position 2"),
    (6, 1, 2): ((4, 0, 1), " at position (0, 1)"),
    (6, 1, 2, 2): ((4, 0, 1, 1), " at position (0, 1, 1)"),
}


@pytest.mark.parametrize("what", ["input", "label"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_named_with_its_place(what, shape, value):
    place, called = SHAPES[shape]
    rows = torch.zeros(shape)
    rows[place] = value
    pair = (rows, torch.zeros(6)) if what == "input" else (torch.zeros(6), rows)
    assert refusal(*pair, 4) == (
        f"the {what}s of batch 1 hold {value} in row 0 (row 4 of the data){called}: every {what} "
        "must be a finite number"
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float64, torch.complex64],
)
def test_nan_is_found_in_every_dtype_that_has_it(dtype):
    rows = torch.tensor([1, math.nan, 2]).to(dtype)
    assert "row 1 (row 1 of the data)" in refusal(rows, torch.zeros(3), 2)


def test_the_first_of_several_is_named():
    rows = torch.tensor([[0.0, 1.0], [2.0, math.nan], [math.inf, math.nan]])
    assert "hold nan in row 1 (row 1 of the data) at position 1" in refusal(rows, rows[:, 0], 3)


@pytest.mark.parametrize("size", [0, -3, 2.5, 2.0, True, "4", None, math.nan, [4]])
def test_a_batch_size_that_is_no_whole_number_from_one_is_quoted(size):
    assert refusal(torch.zeros(3), torch.zeros(3), size) == (
        f"the batch size must be a whole number of at least 1, not {size!r}"
    )


def test_numpys_whole_numbers_are_batch_sizes():
    assert len(Batches(torch.zeros(5), torch.zeros(5), numpy.int64(2))) == 3


@pytest.mark.parametrize("rows", [[1.0, 2.0], numpy.zeros(2), None])
def test_what_is_no_tensor_is_called_by_its_type(rows):
    kind = type(rows).__name__
    assert f"the inputs must be a tensor, not a {kind}" in refusal(rows, torch.zeros(2), 1)
    assert f"the labels must be a tensor, not a {kind}" in refusal(torch.zeros(2), rows, 1)


def test_a_single_number_has_no_rows():
    assert "single number 3.0" in refusal(torch.tensor(3.0), torch.zeros(1), 1)


def test_rows_on_two_devices_are_refused():
    assert "the inputs are on meta but the labels on cpu" in refusal(
        torch.zeros(3, device="meta"), torch.zeros(3), 2
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_whole_numbers_are_inputs_and_stay_what_they_are(dtype):
    rows = torch.ones(3, dtype=dtype)
    ((first, _), _) = Batches(rows, torch.zeros(3), 2)
    assert torch.equal(first, rows[:2]) and first.dtype == dtype
