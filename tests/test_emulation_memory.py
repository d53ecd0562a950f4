"""What ``emulate`` remembers is never stale, whoever wrote to memory, and however."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halp import Quantize, emulate, quantize
from halp.memory import Content
from halp.precision import Precision, RoundedCopies, Rounder


def numpy_view(x: torch.Tensor) -> np.ndarray:
    return x.detach().numpy()


def by_numpy(x):
    numpy_view(x)[...] = 3.3


def by_data(x):
    x.data.fill_(3.3)


def by_new_data(x):
    x.data = torch.full_like(x, 3.3)


def by_set(x):
    with torch.no_grad():
        x.set_(torch.full_like(x, 3.3))


def by_dlpack(x):
    np.asarray(torch.from_dlpack(x.detach()))[...] = 3.3


def in_place(x):
    with torch.no_grad():
        x.fill_(3.3)


WRITES = [by_numpy, by_data, by_new_data, by_set, by_dlpack, in_place]
name_of = lambda f: f.__name__  # noqa: E731


def q(x):
    return x.bfloat16().float()


#: What a product reads shows in it: 3.3 as it is would give another number.
TIMES_13 = q(q(torch.tensor(3.3)) * 13)
assert TIMES_13 != q(torch.tensor(3.3) * 13)


@pytest.mark.parametrize("write", WRITES, ids=name_of)
def test_an_input_is_read_as_it_is_now(write):
    x = torch.ones(2, 4)
    with emulate("bf16"):
        assert torch.equal(x * 1, torch.ones(2, 4))
        write(x)
        assert torch.equal(x * 1, q(torch.full((2, 4), 3.3)))


@pytest.mark.parametrize("write", WRITES, ids=name_of)
@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[:, 1:], lambda x: x.view(-1)])
def test_a_write_is_seen_by_views_that_were_read_before(view, write):
    x = torch.ones(2, 4)
    with emulate("bf16"):
        view(x) * 1
        write(x)
        assert (view(x) * 1 == q(torch.tensor(3.3))).all()


@pytest.mark.parametrize("write", WRITES, ids=name_of)
def test_a_parameter_is_read_as_it_is_now(write):
    layer = nn.Linear(4, 3, bias=False)
    with emulate("bf16"):
        layer(torch.ones(2, 4))
        write(layer.weight)
        with torch.no_grad():
            assert torch.equal(layer(torch.eye(4)), q(torch.full((4, 3), 3.3)))


@pytest.mark.parametrize("write", WRITES, ids=name_of)
def test_a_result_that_was_written_to_is_rounded_before_it_is_read(write):
    x = torch.ones(2, 4)
    with emulate("bf16"):
        result = x * 3
        write(result)
        product = result * 13
    assert torch.equal(product, TIMES_13.expand(2, 4))


def test_a_result_written_to_through_an_array_taken_earlier_is_rounded_too():
    x = torch.ones(2, 4)
    with emulate("bf16"):
        result = x * 3
        array = np.asarray(result)
        result * 1
        array[...] = 3.3
        product = result * 13
    assert torch.equal(product, TIMES_13.expand(2, 4))


class ByNumpy(torch.autograd.Function):
    """Writes to a result of its own backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return overwritten(gradient)


def overwritten(x):
    result = x * 2
    numpy_view(result)[...] = 3.3
    return result * 13


def test_a_backward_pass_of_ones_own_may_write_to_results():
    w = torch.ones(4, requires_grad=True)
    with emulate("bf16"):
        (ByNumpy.apply(w) * 1).sum().backward()
    assert torch.equal(w.grad, TIMES_13.expand(4))


def test_so_may_a_forward_pass_that_is_recomputed():
    w, seen = torch.ones(4, requires_grad=True), []

    def layer(x):
        result = overwritten(x) * x
        seen.append(result.detach())
        return result * result

    with emulate("bf16"):
        checkpoint(layer, w, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    for result in seen:
        assert torch.equal(result, TIMES_13.expand(4))


def test_data_written_in_an_inner_block_is_seen_in_the_outer_one():
    x = torch.ones(4)
    with emulate("bf16"):
        result = x * 3
        with emulate("fp32"):
            result.data.fill_(3.3)
        product = result * 13
    assert torch.equal(product, TIMES_13.expand(4))


def test_looking_at_a_result_with_numpy_changes_no_random_bits():
    x = torch.rand(100, generator=torch.Generator().manual_seed(0))
    results = []
    for looks in (False, True):
        with emulate("fp8_e4m3", "stoc"):
            y = x * 3
            if looks:
                np.asarray(y).sum()
            results.append(y * y)
    assert torch.equal(*results)


def test_an_input_keeps_its_random_bits_until_it_changes():
    x = torch.rand(100, generator=torch.Generator().manual_seed(0))
    rounder = Rounder(Precision("fp8_e4m3", "stoc"))
    known = RoundedCopies(rounder)
    first = known.rounded(x, x.dtype)
    by_numpy(x)
    changed = known.rounded(x, x.dtype)
    assert not torch.equal(first, changed)
    assert torch.equal(known.rounded(x, x.dtype), changed)


def test_batches_in_one_buffer_are_told_apart_by_any_bit():
    """A swap of two rows has the same sum, and −0 equals 0."""
    buffer = np.array([[1.0, -0.0], [3.3, 0.0]], np.float32)
    x = torch.from_numpy(buffer)
    with emulate("bf16"):
        for _ in range(2):
            expected = q(x.clone())
            result = x * 1
            assert torch.equal(result.view(torch.int32), expected.view(torch.int32))
            buffer[:] = buffer[::-1].copy()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]
    + [torch.uint8, torch.complex64, torch.complex128, torch.float8_e4m3fn],
)
def test_content_is_every_bit_of_any_dtype(dtype):
    x = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    for view in (x, x.t(), x[:, ::2], x[:1].expand(2, 3)):
        content = Content(view)
        assert content.is_in(view)
        assert content.is_in(view.clone())
    content = Content(x)
    assert not content.is_in(x[:1])
    x.view(torch.uint8)[1, -1] ^= 1
    assert not content.is_in(x)


def test_content_compares_nan_and_signs_of_zeros():
    x = torch.tensor([float("nan"), 0.0])
    content = Content(x)
    assert content.is_in(x)
    x[1] = -0.0
    assert not content.is_in(x)


def test_inference_tensors_are_read_as_they_are_now():
    with torch.inference_mode(), emulate("bf16"):
        x = torch.ones(3) * 1
        x * 1
        x.fill_(3.3)
        assert torch.equal(x * 1, quantize(torch.full((3,), 3.3), "bf16"))


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fixed8", "mxfp4", "bf16"])
def test_rounding_inside_a_block_is_one_operation(name, rounding):
    """Its own arithmetic is not emulated, forward or backward."""
    torch.manual_seed(0)
    w = torch.randn(4, 64) * torch.exp2(torch.randint(-4, 5, (4, 64)).float())
    layer = Quantize(Precision(name, rounding), name)
    x, upstream = w.clone().requires_grad_(), w.flip(0)

    def rounded() -> list[torch.Tensor]:
        layer.calls.zero_()
        y = layer(x)
        (gradient,) = torch.autograd.grad(y, x, upstream)
        return [quantize(w, name, rounding, seed=3), y.detach(), gradient]

    expected = rounded()
    with emulate("fp4_e2m1"):
        found = rounded()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
