"""In-place views change the shape of both parts and of the tensor that wraps them."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halp
from tests.bitcenter.cached import record
from tests.bitcenter.test_rules import bit_centering

torch.manual_seed(0)
U, E = torch.randn(3, 1, 4), torch.randn(3, 1, 4)

#: Each gives its argument another shape in place.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided_": lambda x: x.as_strided_((4, 3), (1, 4)),
    "as_strided_, part": lambda x: x.as_strided_((2, 2), (4, 1), 5),
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_, dim": lambda x: x.squeeze_(1),
    "squeeze_, dims": lambda x: x.squeeze_((0, 1)),
    "swapaxes_": lambda x: x.swapaxes_(0, 2),
    "swapdims_": lambda x: x.swapdims_(0, 1),
    "t_": lambda x: x.squeeze_(1).t_(),
    "transpose_": lambda x: x.transpose_(0, 2),
    "unsqueeze_": lambda x: x.unsqueeze_(-1),
}
EACH_VIEW = pytest.mark.parametrize("see", VIEWS.values(), ids=VIEWS.keys())


@EACH_VIEW
def test_an_in_place_view_does_to_both_parts_what_it_does_to_a_plain_tensor(see):
    x, before, after = bit_centering()(U, E), U.clone(), E.clone()
    assert see(x) is x
    see(before)
    see(after)
    assert torch.equal(x.offset, before)
    assert torch.equal(x.delta, after)
    for part in (x, x.offset, x.delta):
        assert (part.shape, part.stride()) == (before.shape, before.stride())
        assert part.storage_offset() == before.storage_offset()


@EACH_VIEW
def test_an_in_place_view_of_an_alias_shares_memory_and_leaves_the_original_its_shape(see):
    x = bit_centering()(U, E)
    alias, expected = x.detach(), U.clone()
    see(alias).mul_(2)
    see(expected.view(U.shape)).mul_(2)
    assert x.shape == U.shape
    assert torch.equal(x.offset, expected)


@pytest.mark.parametrize(
    "resize", [lambda x: x.resize_(3, 1, 4), lambda x: x.resize_as_(U)], ids=["size", "like"]
)
def test_resizing_to_the_size_that_a_tensor_has_changes_nothing(resize):
    x = bit_centering()(U, E)
    assert resize(x) is x
    assert torch.equal(x.offset, U)
    assert torch.equal(x.delta, E)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.resize_(2, 6), r"uncover memory.*x\.reshape\(2, 6\)"),
        (lambda x: x.resize_as_(torch.zeros(5)), r"uncover memory.*reshape\(5,\)"),
        (lambda x: x.set_(torch.zeros(3)), r"drop one half.*x\.copy_\(t\)"),
    ],
    ids=["resize_", "resize_as_", "set_"],
)
def test_what_would_change_the_memory_is_refused(change, message):
    x = bit_centering()(U, E)
    with pytest.raises(NotImplementedError, match=message):
        change(x)
    assert torch.equal(x.offset, U)


class Turned(nn.Module):
    """A layer whose output, and a parameter beside it, are seen through an in-place view."""

    def __init__(self, see: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 1, 4))
        self.see = see

    def forward(self, x: Tensor) -> Tensor:
        fixed = self.see(self.scale.detach())
        return self.see(self.layer(x) * self.scale).tanh() * fixed


class Pooled(nn.Module):
    """A small convolutional network that ends with an adaptive average pool."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)
        self.last = nn.Linear(5 * size * size, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.second(F.relu(self.first(x))))
        return self.last(F.adaptive_avg_pool2d(h, self.size).flatten(1))


def backward(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return loss


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    backward(model, x)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def delta_error(model: nn.Module, x: Tensor, offsets: str, rounding: str) -> float:
    """Return the relative error of the delta gradient against float64's autograd."""
    twin, moved = copy.deepcopy(model), copy.deepcopy(model)
    halp.bit_center(model, rounding=rounding, offsets=offsets)
    if offsets == "cached":
        record(model, [(x, x)], lambda x, _: backward(model, x))
    with torch.no_grad():
        for p, plain in zip(model.parameters(), moved.parameters(), strict=True):
            z = 1e-4 * torch.randn_like(plain)
            z = z if rounding == "void" else halp.quantize(z, "fp16", scale="auto")
            p.delta.copy_(z)
            plain.add_(z)
    backward(model, x)
    true = gradients(moved, x) - gradients(twin, x)
    computed = torch.cat([p.grad.delta.flatten() for p in model.parameters()])
    return ((computed - true).norm() / true.norm()).item()


OFFSETS = pytest.mark.parametrize("offsets", ["on-site", "cached"])
#: With the relative error that it allows: float64's roundoff over 1e-4, and a few of fp16's.
ROUNDING = pytest.mark.parametrize(
    ("rounding", "tolerance"), [("void", 1e-9), ("near", 4e-3)], ids=["exact", "fp16"]
)


@OFFSETS
@ROUNDING
@EACH_VIEW
def test_the_delta_gradient_is_right_through_in_place_views(see, rounding, tolerance, offsets):
    torch.manual_seed(0)
    model, x = Turned(see).double(), torch.randn(3, 1, 4, dtype=torch.float64)
    assert delta_error(model, x, offsets, rounding) < tolerance


@OFFSETS
@ROUNDING
@pytest.mark.parametrize("size", [1, 2])
def test_the_delta_gradient_is_right_through_adaptive_pools_of_channels_last_activations(
    size, rounding, tolerance, offsets
):
    torch.manual_seed(0)
    model = Pooled(size).double().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 7, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert delta_error(model, x, offsets, rounding) < tolerance


@OFFSETS
@ROUNDING
@pytest.mark.parametrize("size", [1, 2])
def test_strides_count_from_where_a_tensor_begins_wherever_its_parts_lie(
    size, rounding, tolerance, offsets
):
    """Without rounding, kept offsets lie among others in the cache's memory."""

    class Halves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            left, right = super().forward(x).unsafe_chunk(2, 1)
            return left.as_strided((2, size), (4, 1), 4) * right.as_strided((2, size), (4, 1))

    torch.manual_seed(0)
    model, x = Halves(4, 4).double(), torch.randn(3, 4, dtype=torch.float64)
    assert delta_error(model, x, offsets, rounding) < tolerance
