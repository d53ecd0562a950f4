"""Operations in place, and through views, change offset and delta alike."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import halp
from halp.bitcenter import BitCenteredTensor
from tests.bitcenter.test_rules import bit_centering

torch.manual_seed(0)
U, E = torch.randn(3, 4), torch.randn(3, 4)
V, D = torch.randn(3, 4), torch.randn(3, 4)
MASK = torch.tensor([[True, False, True, False]])


def pair() -> tuple[BitCenteredTensor, BitCenteredTensor]:
    make = bit_centering()
    return make(U, E), make(V, D)


def assert_parts(x: Tensor, offset: Tensor, value: Tensor) -> None:
    assert type(x) is BitCenteredTensor
    torch.testing.assert_close(x.offset, offset, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.offset + x.delta, value, rtol=1e-6, atol=1e-6)


#: Each changes its first argument in place; the second is another tensor of its kind.
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda x, y: x.add_(y),
    "add_, alpha": lambda x, y: x.add_(y, alpha=3),
    "add_, number": lambda x, y: x.add_(2),
    "add_, plain": lambda x, y: x.add_(torch.ones(3, 1)),
    "sub_": lambda x, y: x.sub_(y),
    "mul_": lambda x, y: x.mul_(y),
    "mul_, number": lambda x, y: x.mul_(2),
    "mul_, itself": lambda x, y: x.mul_(x),
    "div_": lambda x, y: x.div_(y * y + 1),
    "neg_": lambda x, y: x.neg_(),
    "exp_": lambda x, y: x.exp_(),
    "relu_": lambda x, y: x.relu_(),
    "sigmoid_": lambda x, y: x.sigmoid_(),
    "tanh_": lambda x, y: x.tanh_(),
    "clamp_": lambda x, y: x.clamp_(-0.5, 0.5),
    "masked_fill_": lambda x, y: x.masked_fill_(MASK, 2.5),
    "masked_fill_, decided": lambda x, y: x.masked_fill_(y > 0, 2.5),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(3),
    "copy_": lambda x, y: x.copy_(y),
    "copy_, broadcast": lambda x, y: x.copy_(y[0]),
    "copy_, plain": lambda x, y: x.copy_(torch.ones(3, 4)),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.5),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([1, 0, 1]), y),
    "+=": lambda x, y: x.__iadd__(y),
    "*=": lambda x, y: x.__imul__(y),
}
IN_PLACE_CASES = pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE.keys())


@IN_PLACE_CASES
def test_in_place_operations_do_to_both_parts_what_they_do_to_a_plain_tensor(change):
    x, y = pair()
    offset, delta = x.offset, x.delta
    before, after = U.clone(), U + E
    result = change(x, y)
    change(before, V)
    change(after, V + D)
    assert result is x
    assert x.offset is offset
    assert x.delta is delta
    assert_parts(x, before, after)
    assert_parts(y, V, V + D)


#: Views that an in-place operation may go through.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda x: x[0],
    "element": lambda x: x[1, 2],
    "slice": lambda x: x[1:, ::2],
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "view": lambda x: x.view(2, 6),
    "flatten": lambda x: x.flatten(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 4)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "split": lambda x: x.split(2, 1)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "unbind": lambda x: x.unbind(1)[3],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "view of a view": lambda x: x.t()[1:3].t()[:2],
}


@pytest.mark.parametrize("see", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x.add_(1.5),
        lambda x: x.zero_(),
        lambda x: x.relu_(),
        lambda x: x.copy_(torch.ones(())),
    ],
    ids=["mul_", "add_", "zero_", "relu_", "copy_"],
)
def test_writing_to_a_view_writes_to_both_parts_of_its_base(see, change):
    x, _ = pair()
    before, after = U.clone(), U + E
    change(see(x))
    change(see(before))
    change(see(after))
    assert_parts(x, before, after)


@pytest.mark.parametrize("see", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_shows_what_is_written_to_its_base(see):
    x, _ = pair()
    view = see(x)
    x.mul_(3)
    before, after = 3 * U, 3 * (U + E)
    assert_parts(view, see(before), see(after))
    assert view.shape == see(U).shape
    assert view.stride() == see(U).stride()


@pytest.mark.parametrize("see", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_is_never_rounded(see):
    """Of an unrounded delta, and after its base was read in low precision."""
    x = bit_centering("fp8_e4m3", "near")(U, E)
    assert x.low_offset.shape == U.shape
    view = see(x)
    assert torch.equal(view.delta, see(E))
    assert torch.equal(view.offset, see(U))


def test_what_an_operation_reads_of_an_offset_is_current_after_a_write():
    """The low-precision copy of an offset is kept, but not beyond a change of it."""
    x = bit_centering("fp16", "near")(U, E)
    plain = torch.ones(3, 4)
    (x * plain).delta.sum()
    rounded = x.low_offset.clone()
    for write in (
        lambda: x.mul_(2),
        lambda: x[0].mul_(2),
        lambda: x.data.t().mul_(2),
        lambda: x.offset.mul_(2),
        lambda: x.detach().copy_(8 * U),
    ):
        write()
        assert not torch.equal(x.low_offset, rounded)
        rounded = x.low_offset.clone()
        assert torch.equal(rounded, halp.quantize(x.offset, "fp16", scale="auto"))
        assert torch.equal(x.t().low_offset, rounded.t())


@pytest.mark.parametrize("make", [torch.zeros_like, torch.ones_like, lambda x: x.new_zeros(3, 4)])
@pytest.mark.parametrize(
    "write",
    [
        lambda z, x: z.add_(x),
        lambda z, x: z.copy_(x),
        lambda z, x: z[0].add_(x[0]),
        lambda z, x: z.t().copy_(x.t()),
        lambda z, x: z.detach().sub_(x),
        lambda z, x: z.mul_(x),
    ],
    ids=["add_", "copy_", "row", "transpose", "detached", "mul_"],
)
def test_a_constant_that_is_written_to_is_no_longer_constant(make, write):
    x, _ = pair()
    z, before, after = make(x), make(U), make(U)
    assert torch.equal((z * 2).value, 2 * before)
    write(z, x)
    write(before, U)
    write(after, U + E)
    assert_parts(z * 2, 2 * before, 2 * after)


@pytest.mark.parametrize(
    "write",
    [
        lambda model: model.weight.data.mul_(2),
        lambda model: model.load_state_dict(torch.nn.Linear(4, 3).state_dict()),
        lambda model: torch.nn.init.zeros_(model.weight),
        lambda model: model.weight.detach()[0].fill_(1.0),
    ],
    ids=["data", "load_state_dict", "init", "view"],
)
def test_a_write_to_a_center_makes_a_snapshot_due(write):
    model = halp.bit_center(torch.nn.Linear(4, 3))
    optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.1, T=5)
    batches = [(U, V[:, :3])]

    def closure(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.snapshot(batches, closure)
    optimizer.step(lambda: closure(*batches[0]))
    assert not optimizer.snapshot_due
    write(model)
    assert optimizer.snapshot_due


def test_results_of_in_place_operations_are_rounded():
    x = bit_centering("fp16", "near")(U, E)
    x.mul_(1 / 3)
    assert torch.equal(x.delta, halp.quantize(x.delta, "fp16", scale="auto"))
    torch.testing.assert_close(x.delta, E / 3, rtol=1e-3, atol=1e-6)


def test_autograd_goes_through_in_place_operations():
    def loss(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(x).mul_(x)
        y[0].mul_(3)
        y.t()[1].add_(x[:, 2])
        y.masked_fill_(MASK, 0.5)
        y.relu_()
        return y.square().sum()

    x = bit_centering()(U, E).requires_grad_()
    loss(x).backward()
    for computed, at in ((x.grad.offset, U), (x.grad.value, U + E)):
        plain = at.clone().requires_grad_()
        loss(plain).backward()
        torch.testing.assert_close(computed, plain.grad, rtol=1e-5, atol=1e-5)


def test_autograd_refuses_to_change_a_leaf_as_it_does_for_plain_tensors():
    x = bit_centering()(U, E).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        x.mul_(2)
    with torch.no_grad():
        x.mul_(2)
    assert_parts(x, 2 * U, 2 * (U + E))


def test_autograd_notices_what_was_changed_after_it_was_saved():
    x = bit_centering()(U, E).requires_grad_()
    y = x.exp()
    z = y * y
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda plain, x: plain.copy_(x),
        lambda plain, x: plain.add_(x),
        lambda plain, x: plain.mul_(x),
        lambda plain, x: torch.add(x, x, out=plain),
        lambda plain, x: plain.__setitem__(0, x[0]),
    ],
    ids=["copy_", "add_", "mul_", "out", "setitem"],
)
def test_a_plain_tensor_cannot_swallow_a_delta(write):
    plain = torch.ones(3, 4)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"delta|plain"):
        write(plain, bit_centering()(U, E))
    assert torch.equal(plain, torch.ones(3, 4))


def test_assignment_to_an_index_changes_both_parts():
    x, y = pair()
    before, after = U.clone(), U + E
    x[0] = y[1]
    x[1, 2] = 5.0
    x[:, 3] = torch.arange(3.0)
    for plain, other in ((before, V), (after, V + D)):
        plain[0] = other[1]
        plain[1, 2] = 5.0
        plain[:, 3] = torch.arange(3.0)
    assert_parts(x, before, after)


def test_gradients_accumulate_over_backward_passes_in_both_parts():
    x = bit_centering()(U, E).requires_grad_()
    (x * x).sum().backward()
    (x * x * x).sum().backward()
    for computed, at in ((x.grad.offset, U), (x.grad.value, U + E)):
        torch.testing.assert_close(computed, 2 * at + 3 * at * at, rtol=1e-5, atol=1e-5)


def test_an_offset_of_a_gradient_not_yet_read_is_that_of_the_time_before_a_write():
    """Backward offsets are computed when first read; writing to a parameter must not move them."""
    x = bit_centering()(U, E).requires_grad_()
    (x * x).sum().backward()
    with torch.no_grad():
        x.mul_(5)
    torch.testing.assert_close(x.grad.offset, 2 * U)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.data.zero_(),
        lambda x: x.detach()[0].add_(1),
        lambda x: x.data.uniform_(-1, 1),
        lambda x: torch.nn.init.normal_(x),
    ],
    ids=["data", "view", "uniform_", "init"],
)
def test_an_offset_of_a_gradient_survives_every_way_to_write(write):
    x = bit_centering()(U, E).requires_grad_()
    y = x * x
    y.sum().backward()
    write(x)
    torch.testing.assert_close(x.grad.offset, 2 * U)
