"""Under ``emulate`` blocks lie along the last dimension of each operand as it is used."""

import pytest
import torch

import halp
from halp import emulate, quantize
from halp.formats import BlockFormat, get, names
from halp.precision import Precision, RoundedCopies, Rounder
from tests.block_views import VIEWS, spread

FORMATS = ["mxfp4", "mxfp8_e4m3"]


@pytest.mark.parametrize("first", ["the matrix", "t", "narrower"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_rounded_in_its_own_shape_whatever_was_read_before(view, first):
    w = spread(4, 64)
    operand = quantize(VIEWS[view](w).contiguous(), "mxfp4")
    with emulate("mxfp4"):
        VIEWS[first](w) * 1
        product = VIEWS[view](w) * 1.375
    assert torch.equal(product, quantize(operand * 1.375, "mxfp4"))


@pytest.mark.parametrize("format", FORMATS)
def test_some_views_have_other_blocks(format):
    """Else the tests here would show nothing."""
    w = spread(4, 64)
    whole = quantize(w, format)
    others = [name for name, see in VIEWS.items() if not equal_blocks(see, w, whole, format)]
    assert len(others) >= 8
    assert "t" in others


def equal_blocks(see, w, whole, format) -> bool:
    return torch.equal(quantize(see(w), format), see(whole))


@pytest.mark.parametrize("view", VIEWS)
def test_a_result_that_is_read_as_a_view_is_rounded_again_in_its_shape(view):
    """It lies on the grid in its own shape."""
    w = spread(4, 64)
    with emulate("mxfp4"):
        stored = w * 1
        product = VIEWS[view](stored) * 1.375
    assert torch.equal(stored, quantize(w, "mxfp4"))
    operand = quantize(VIEWS[view](stored).contiguous(), "mxfp4")
    assert torch.equal(product, quantize(operand * 1.375, "mxfp4"))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.t().mul_(3.0),
        lambda x: x[:, 5:20].mul_(3.0),
        lambda x: x.data.t().mul_(3.0),
        lambda x: x.view(16, 16).data.add_(1.0),
    ],
)
def test_writing_to_a_view_leaves_the_whole_with_blocks_of_its_own(write):
    w = spread(4, 64)
    with emulate("mxfp4"):
        stored = w * 1
        write(stored)
        product = stored * 1.375  # in which it shows what was read
    operand = quantize(stored, "mxfp4")
    assert not torch.equal(operand, stored)
    assert torch.equal(product, quantize(operand * 1.375, "mxfp4"))
    assert not torch.equal(product, quantize(stored * 1.375, "mxfp4"))


@pytest.mark.parametrize("format", FORMATS)
def test_a_matrix_product_reads_blocks_along_the_last_dimension_of_both(format):
    x, w = spread(8, 64), spread(4, 64, seed=1)
    expected = quantize(quantize(x, format) @ quantize(w.t(), format), format)
    with emulate(format):
        w * 1
        product = x @ w.t()
    torch.testing.assert_close(product, expected, rtol=0, atol=0)


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("layout", ["contiguous", "t", "channels last", "permuted"])
def test_elements_are_rounded_once_for_all_views_that_fill_the_memory(layout, rounding):
    """Also where rounding is random: forward and backward read the same bits."""
    rounder = Rounder(Precision("fp8_e4m3", rounding))
    known = RoundedCopies(rounder)
    x = spread(2, 3, 4, 5)
    see = {
        "contiguous": lambda x: x.contiguous(),
        "t": lambda x: x.view(6, 20).t(),
        "channels last": lambda x: x.permute(0, 2, 3, 1),
        "permuted": lambda x: x.permute(3, 1, 0, 2),
    }[layout]
    first = known.rounded(see(x), x.dtype)
    position = rounder.position
    assert torch.equal(see(known.rounded(x, x.dtype)), first)
    assert torch.equal(known.rounded(see(x), x.dtype), first)
    assert rounder.position == position
    if rounding == "near":
        assert torch.equal(first, quantize(see(x), "fp8_e4m3"))


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp4"])
def test_any_operand_is_rounded_once_where_rounding_is_random(format):
    x = spread(4, 64)[:, 3:]  # has gaps in its memory
    known = RoundedCopies(Rounder(Precision(format, "stoc")))
    assert torch.equal(known.rounded(x, x.dtype), known.rounded(x, x.dtype))


def test_formats_say_whether_rounding_commutes_with_views():
    for name in names():
        assert get(name).is_elementwise == (not isinstance(get(name), BlockFormat))
        assert Precision(name).commutes_with_views == get(name).is_elementwise
    assert not Precision("fixed8", scale=torch.tensor([1.0, 2.0])).commutes_with_views
    assert Precision("fixed8", scale=torch.tensor(2.0)).commutes_with_views


def test_quantize_means_the_same_inside_emulate():
    """Its own arithmetic is none of the model's."""
    x = spread(4, 64)
    layer = halp.Quantize("mxfp4")
    with emulate("fp8_e4m3"):
        to_half, inside = quantize(x, "fp16"), layer(x)
    assert torch.equal(to_half, x.half().float())
    assert torch.equal(inside, quantize(x, "mxfp4"))
