"""Blocks lie along the last dimension of each operand of a bit-centered operation as it is used."""

import pytest
import torch
from torch import nn

import halp
from halp import quantize
from halp.bitcenter import BitCenteredTensor, Operand
from tests.block_views import VIEWS, spread

MX = "mxfp4"


class Matrix(nn.Module):
    """A parameter of 4 × 64, of which a view is multiplied with an input."""

    def __init__(self, see) -> None:
        super().__init__()
        self.w = nn.Parameter(spread(4, 64))
        self.see = see

    def forward(self, x):
        return self.see(self.w) * x


def centered(view="t", format=MX, offsets="on-site", rounding="near") -> Matrix:
    """Return a bit-centered model with a delta on the grid."""
    model = halp.bit_center(Matrix(VIEWS[view]), format, rounding, offsets=offsets, scale=None)
    with torch.no_grad():
        model.w.delta.copy_(quantize(spread(4, 64, seed=1) / 8, format))
    return model


def operand(x: BitCenteredTensor) -> Operand:
    return Operand(x, x.context, x.delta.dtype)


@pytest.mark.parametrize("first", ["the matrix", "t", "narrower"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_read_in_its_own_shape_whatever_was_read_before(view, first):
    model, see = centered(view), VIEWS[view]
    u, e = see(model.w.offset).contiguous(), see(model.w.delta).contiguous()
    with torch.no_grad():
        before = operand(VIEWS[first](model.w.detach()))
        before.offset, before.delta  # noqa: B018
        read = operand(see(model.w.detach()))
    assert torch.equal(read.offset, quantize(u, MX))
    assert torch.equal(read.delta, quantize(e, MX))


@pytest.mark.parametrize("view", VIEWS)
def test_a_product_with_a_view_is_that_of_its_rounded_parts(view):
    """``δ(x·w) = u_x·e_w`` of a constant x, rounded once in the shape of the result."""
    model, see = centered(view), VIEWS[view]
    x = spread(*see(torch.empty(4, 64)).shape, seed=2)
    e = quantize(see(model.w.delta).contiguous(), MX)
    with torch.no_grad():
        result = model(x)
    assert torch.equal(result.delta, quantize(quantize(x, MX) * e, MX))


@pytest.mark.parametrize("view", ["t", "narrower", "channels last"])
def test_a_constant_input_is_read_in_its_own_shape(view):
    model, see = centered("the matrix"), VIEWS[view]
    x = spread(4, 64, seed=2)
    with torch.no_grad():
        model.w * x
        w = see(model.w.detach())
        result = w * see(x)
        expected = operand(w).delta * quantize(see(x).contiguous(), MX)
    assert torch.equal(result.delta, quantize(expected.contiguous(), MX))


def test_a_result_is_read_as_it_was_rounded_and_its_views_in_their_shape():
    """mxint8 rounded twice would differ where a block's largest number is its most negative."""
    model = centered("the matrix", "mxint8")
    with torch.no_grad():
        model.w.delta.copy_((2 * torch.arange(256).view(4, 64) % 60 + 1) / 64)
        model.w.delta[:, 0] = -127 / 64
        h = model.w * 1.006  # −1.996 becomes −2, which is −1 on the next scale
        again = quantize(h.delta, "mxint8")
        assert not torch.equal(again, h.delta)
        assert torch.equal(operand(h).delta, h.delta)
        assert torch.equal(operand(h.t()).delta, quantize(h.delta.t().contiguous(), "mxint8"))


def test_writing_to_a_view_leaves_the_whole_with_blocks_of_its_own():
    model = centered()
    with torch.no_grad():
        h = model.w * 1.0
        h.t().mul_(3.0)
        h[:, 5:20].mul_(3.0)
        assert not torch.equal(quantize(h.delta, MX), h.delta)
        assert torch.equal(operand(h).delta, quantize(h.delta, MX))


def test_max_pooling_reads_a_view_in_its_own_shape():
    model = centered()
    pool = lambda x: torch.nn.functional.max_pool2d(x, (1, 2))  # noqa: E731
    with torch.no_grad():
        model.w.offset.round_()  # so that sums are exact
        model.w.delta.copy_(quantize(spread(4, 64, seed=1), MX))
        pooled = pool(model.see(model.w.detach())[None, None])
    u, e = model.w.offset.t()[None, None], model.w.delta.t()[None, None]
    read = quantize(e.contiguous(), MX)
    assert torch.equal(pooled.delta, quantize(pool(u + read) - pool(u), MX))
    assert not torch.equal(pooled.delta, quantize(pool(u + e) - pool(u), MX))


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("view", ["t", "narrower"])
def test_forward_and_backward_read_the_same_bits(view, rounding):
    """Also of random ones: each operand is rounded once a step."""
    model, reads = centered(view, "mxfp8_e4m3", rounding=rounding), []
    for _ in range(2):
        read = operand(model.see(model.w.detach()))
        reads.append((read.offset, read.delta))
    for first, second in zip(*reads, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("solver", [halp.optim.BitCenterSGD, halp.optim.BitCenterSVRG])
@pytest.mark.parametrize("view", ["t", "narrower", "columns", "split", "channels last"])
def test_cached_offsets_are_those_on_site(view, solver):
    """A view of what is kept of a result would have other blocks: it is kept for itself."""
    deltas, see = [], VIEWS[view]
    x = spread(*see(torch.empty(4, 64)).shape, seed=3)
    for offsets in ("on-site", "cached"):
        model = halp.bit_center(Matrix(see), MX, offsets=offsets)
        optimizer = solver(model.parameters(), lr=2.0**-12, T=10)

        def closure(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            h = see(model.w * 1.25)
            loss = (h * h.square() * x + model(x) + model.w.t().square().mean()).sum()
            loss.backward()
            return loss

        optimizer.snapshot([(x,)], closure)
        for _ in range(2):
            optimizer.step(lambda: closure(x))  # noqa: B023
        deltas.append(model.w.delta)
    assert deltas[0].count_nonzero() > 0
    assert torch.equal(*deltas)


@pytest.mark.parametrize("format", [MX, "mxint8"])
def test_the_update_reads_gradients_in_blocks_of_the_parameter(format):
    """The gradient comes back as a view of one with another shape."""
    model = halp.bit_center(Matrix(VIEWS["narrower"]), format)
    optimizer = halp.optim.BitCenterSGD(model.parameters(), lr=1.0, T=10)
    optimizer.snapshot([], lambda: None)
    x = spread(16, 16, seed=3)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    closure()
    raw, read = model.w.grad.delta, optimizer._delta_gradient(model.w)
    assert not torch.equal(quantize(raw.contiguous(), format), raw)
    assert torch.equal(read, quantize(raw.contiguous(), format))
