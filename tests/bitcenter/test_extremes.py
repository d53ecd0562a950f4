"""Rules where values are infinite or NaN, or where the delta takes most of the offset away."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bitcenter.test_rules import bit_centering

INF, NAN = torch.inf, torch.nan

NORMALIZATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "layer": lambda x: F.layer_norm(x, (4, 4)),
    "group": lambda x: F.group_norm(x, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread, taken", [(10, 1), (100, 0.9999), (1000, 0.99999), (1, 0.3)])
@pytest.mark.parametrize("run", NORMALIZATIONS.values(), ids=NORMALIZATIONS.keys())
def test_normalization_is_right_where_the_delta_takes_the_variance_away(run, spread, taken, dtype):
    torch.manual_seed(0)
    u = (spread * torch.randn(64, 1, 4, 4)).to(dtype)
    e = -taken * u
    weight = torch.randn(u.shape, dtype=torch.float64)

    def loss_of(y: Tensor) -> Tensor:
        return (weight.to(y.dtype) * y).sum() + y.square().sum()

    x = bit_centering()(u, e).requires_grad_()
    y = run(x)
    loss_of(y).backward()
    true_x = (u.double() + e.double()).requires_grad_()
    true_y = run(true_x)
    loss_of(true_y).backward()
    roundoff = torch.finfo(dtype).eps
    assert (y.value.double() - true_y).norm() <= 4 * roundoff * (y.offset.norm() + true_y.norm())
    assert (x.grad.value.double() - true_x.grad).norm() <= 32 * roundoff * true_x.grad.norm()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky relu": lambda x: F.leaky_relu(x, 0.25),
    "max-pool": lambda x: F.max_pool1d(x.view(1, 1, -1), 2).view(-1),
    "adaptive max-pool": lambda x: F.adaptive_max_pool1d(x.view(1, 1, -1), 3).view(-1),
    "max-pool of relu": lambda x: F.max_pool1d(torch.relu(x).view(1, 1, -1), 3).view(-1),
}


@pytest.mark.parametrize("run", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
@pytest.mark.parametrize(
    "u",
    [
        [1.0, -INF, -INF, -INF, 2.0, -1.0],  # as masks set them
        [INF, 1.0, INF, -INF, -2.0, 3.0],
        [INF, INF, -INF, -INF, 0.0, 0.0],
    ],
)
def test_infinite_offsets_stay_what_they_are(run, u):
    u, e = torch.tensor(u), torch.tensor([0.25, 0.5, -0.25, 1.0, -0.5, 0.125])
    x = bit_centering()(u, e).requires_grad_()
    y = run(x)
    assert torch.equal(y.value, run(u + e))
    y.sum().backward()
    for computed, at in ((x.grad.offset, u), (x.grad.value, u + e)):
        plain = at.clone().requires_grad_()
        run(plain).sum().backward()
        assert computed.sum() == plain.grad.sum()  # of equal infinities any may be the winner


@pytest.mark.parametrize("u, e", [(1.0, NAN), (NAN, 1.0), (-1.0, NAN)])
def test_nan_passes_a_relu_as_in_pytorch_and_so_does_its_gradient(u, e):
    x = bit_centering()(torch.tensor([u]), torch.tensor([e])).requires_grad_()
    y = torch.relu(x)
    assert y.value.isnan().all()
    y.backward()
    assert x.grad.value == 1
