"""Rounded copies of plain tensors are never stale, and blocks lie along the operand's own rows."""

import numpy
import pytest
import torch
from torch import nn

import halp


@pytest.fixture
def w() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-4, 5, (4, 64), generator=generator)
    return torch.randn(4, 64, generator=generator) * torch.exp2(exponents.float())


def test_a_buffer_that_numpy_refills_is_rounded_anew():
    buffer = numpy.zeros((2, 4), numpy.float32)
    x = torch.from_numpy(buffer)
    model = halp.bit_center(nn.Linear(4, 1, bias=False), "bf16")
    model.weight.delta.fill_(0.5)
    with halp.emulate("bf16"):
        for number in (1.0, 3.0):
            buffer[:] = number
            assert (x + 0)[0, 0].item() == number
    for number in (1.0, 3.0):
        buffer[:] = number
        assert model(x).delta[0, 0].item() == 2 * number


def test_a_write_through_data_is_seen():
    x = torch.ones(2, 4)
    with halp.emulate("bf16"):
        for number in (1.0, 3.0):
            x.data.fill_(number)
            assert (x + 0)[0, 0].item() == number


VIEWS = {
    "other rows": lambda w: w.view(16, 16),
    "transposed": lambda w: w.t(),
    "one row": lambda w: w.view(-1),
    "a part": lambda w: w[:, 3:40],
    "unsqueezed": lambda w: w.unsqueeze(-1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("read_first", [False, True])
def test_blocks_lie_along_the_rows_of_the_operand_whatever_was_read_before(w, view, read_first):
    expected = halp.quantize(view(w), "mxfp4")
    with halp.emulate("mxfp4"):
        if read_first:
            w + 0
        assert torch.equal(view(w) + 0, expected)
        computed = w + 0
        assert torch.equal(view(computed) + 0, halp.quantize(view(computed), "mxfp4"))


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fixed8", "mxfp4", "bf16"])
def test_rounding_inside_a_block_is_one_operation(w, name, rounding):
    """Its own arithmetic is not emulated, forward or backward."""
    torch.manual_seed(0)
    layer = halp.Quantize(halp.Precision(name, rounding), name)
    x, upstream = w.clone().requires_grad_(), w.flip(0)

    def rounded() -> list[torch.Tensor]:
        layer.calls.zero_()
        y = layer(x)
        (gradient,) = torch.autograd.grad(y, x, upstream)
        return [halp.quantize(w, name, rounding, seed=3), y.detach(), gradient]

    expected = rounded()
    with halp.emulate("fp4_e2m1"):
        found = rounded()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_refill_that_changes_signs_of_zeros_alone_is_seen():
    buffer = numpy.zeros(2, numpy.float32)
    x = torch.from_numpy(buffer)
    with halp.emulate("bf16"):
        assert not (x * 1).signbit().any()
        buffer[:] = -0.0
        assert (x * 1).signbit().all()


@pytest.mark.parametrize("solver", ["LPSGD", "LPSVRG"])
def test_parameters_written_through_data_are_put_on_the_grid(solver):
    torch.manual_seed(0)
    layer = nn.Linear(4, 1)
    options = {"T": 5} if solver == "LPSVRG" else {}
    optimizer = getattr(halp.optim, solver)(
        layer.parameters(), lr=0.0, format="fp8_e4m3", **options
    )
    x = torch.ones(2, 4)

    def closure(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        return loss

    optimizer.snapshot([x], closure)
    optimizer.step(lambda: closure(x))
    layer.weight.data.fill_(1.01)
    optimizer.step(lambda: closure(x))
    assert torch.equal(layer.weight.detach(), torch.ones(1, 4))


@pytest.mark.parametrize("solver", ["LPSGD", "LPSVRG"])
@pytest.mark.parametrize("rounding", ["near", "stoc"])
def test_a_bfloat16_model_trains_in_formats_that_bfloat16_holds(solver, rounding):
    options = {"T": 5} if solver == "LPSVRG" else {}

    def trained(format: str) -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Linear(4, 3).bfloat16()
        optimizer = getattr(halp.optim, solver)(
            layer.parameters(), lr=0.1, momentum=0.9, format=format, rounding=rounding, **options
        )
        x = torch.randn(5, 4).bfloat16()

        def closure(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            return loss

        optimizer.snapshot([x], closure)
        for _ in range(3):
            optimizer.step(lambda: closure(x))
        return layer

    assert trained("bf16").weight.isfinite().all()
    weights = trained("fp8_e4m3").weight.detach().float()
    assert torch.equal(halp.quantize(weights, "fp8_e4m3"), weights)


def test_a_result_that_its_dtype_does_not_hold_is_refused():
    rounder = halp.precision.Rounder(halp.Precision("fixed16", scale=2.0**-8))
    x = torch.tensor([1.0 + 2.0**-7, 3.0]).bfloat16()
    assert torch.equal(rounder(x), x)
    scaled = halp.precision.Rounder(halp.Precision("fixed16", scale=0.3))
    with pytest.raises(TypeError, match=r"torch\.bfloat16 does not hold the values of fixed16"):
        scaled(x)
