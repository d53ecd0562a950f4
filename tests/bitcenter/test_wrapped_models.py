"""What PyTorch's tools make of a model trains bit-centered, or is refused with what would do."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, prune

import halp
from tests.bitcenter.cached import record

OFFSETS = pytest.mark.parametrize("offsets", ["on-site", "cached"])
#: With the relative error that it allows: float64's roundoff over 1e-4, and a few of fp16's.
ROUNDING = pytest.mark.parametrize(
    ("rounding", "tolerance"), [("void", 1e-9), ("near", 5e-3)], ids=["exact", "fp16"]
)


class Indexed(nn.Linear):
    """A layer whose output is read and written by indices and masks."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)[torch.tensor([0, 2, 2])]
        z = y * 2
        z[torch.tensor([True, False, True])] = 0.5
        z[torch.tensor([1])] = y[:1]
        return z * y


class Attention(nn.MultiheadAttention):
    """Self-attention without its weights, which PyTorch computes in one operation."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


def pruned() -> nn.Module:
    layer = nn.Linear(4, 3)
    prune.l1_unstructured(layer, "weight", 0.3)
    return layer


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return utils.weight_norm(nn.Linear(4, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "indices": lambda: Indexed(4, 3),
    "pruned": pruned,
    "old weight norm": old_weight_norm,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "weight norm, dim": lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=1),
    "skip_init": lambda: nn.Sequential(utils.skip_init(nn.Linear, 4, 3), nn.LayerNorm(3)),
    "DataParallel": lambda: nn.DataParallel(nn.Linear(4, 3), device_ids=[]),
    "attention": lambda: Attention(4, 2, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(
        4, 2, 6, dropout=0.0, activation="gelu", batch_first=True
    ),
}


def backward(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):
        loss = (model(x) * torch.linspace(-1, 1, 3 if x.dim() == 2 else 4)).tanh().square().sum()
        loss.backward()
    return loss


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    backward(model, x)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@OFFSETS
@ROUNDING
@pytest.mark.parametrize("name", MODELS)
def test_the_delta_gradient_is_right(name, rounding, tolerance, offsets):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for p in model.parameters():
        nn.init.uniform_(p, -1, 1)
    x = torch.randn(*((3, 5) if name in ("attention", "transformer") else (5,)), 4).double()
    twin, moved = (MODELS[name]().double() for _ in range(2))
    for plain in (twin, moved):
        plain.load_state_dict(model.state_dict())
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
    assert (computed - true).norm() <= tolerance * true.norm()


def test_a_layer_that_evaluates_in_one_operation_says_how_to_evaluate_it():
    torch.manual_seed(0)
    model, x = halp.bit_center(MODELS["transformer"]()).eval(), torch.randn(3, 5, 4)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"halp\.materialize\(model\)"):
        model(x)
    with torch.no_grad(), halp.materialize(model):
        expected = model(x)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(halp.value(model(x)), expected)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_training_is_refused_both_ways_round():
    model = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 3)))
    with pytest.raises(TypeError, match=r"module '0' is a DistributedDataParallel.*one process"):
        halp.bit_center(model)
    assert not halp.bitcenter.is_bit_centered(model)
    with pytest.raises(NotImplementedError, match=r"c10d\..*train in one process"):
        nn.parallel.DistributedDataParallel(halp.bit_center(nn.Linear(4, 3)))


def test_replicas_on_several_devices_are_refused():
    model = nn.DataParallel(nn.Linear(4, 3), device_ids=[])
    model.device_ids = [0, 1]
    with pytest.raises(TypeError, match="the model is a DataParallel"):
        halp.bit_center(model)


@pytest.mark.parametrize(
    "run",
    [
        lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=None),
        lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    ],
    ids=["weight norm of all", "spectral norm"],
)
def test_a_norm_of_a_parameter_says_what_to_write(run):
    with pytest.raises(NotImplementedError, match=r"t\.square\(\)\.sum\(\)\.sqrt\(\)"):
        halp.bit_center(run())(torch.ones(2, 4))


def test_layers_fused_for_evaluation_compute_what_they_did_apart():
    torch.manual_seed(0)
    model = halp.bit_center(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    x = torch.randn(2, 3, 6, 6)
    fused = utils.fuse_conv_bn_eval(*model)
    torch.testing.assert_close(fused(x).value, model(x).value)


def test_a_model_is_called_with_other_parameters():
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    model, x = halp.bit_center(copy.deepcopy(plain)), torch.randn(5, 4)
    values = {name: halp.value(p) for name, p in model.named_parameters()}
    for parameters in (values, dict(model.named_parameters())):
        result = torch.func.functional_call(model, parameters, (x,))
        torch.testing.assert_close(halp.value(result), plain(x).detach())


@OFFSETS
def test_a_model_becomes_plain_after_a_step(offsets):
    """Of a step with cached offsets, gradients have no offset to make a plain one of."""
    torch.manual_seed(0)
    model, x = halp.bit_center(nn.Linear(4, 3), offsets=offsets), torch.randn(5, 4)
    optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.1, T=3)

    def closure(*_: Tensor) -> Tensor:
        optimizer.zero_grad()
        return backward(model, x)

    optimizer.snapshot([(x, x)], closure)
    optimizer.step(closure)
    values = [halp.value(p) for p in model.parameters()]
    halp.to_plain(model)
    for p, expected in zip(model.parameters(), values, strict=True):
        assert type(p) is nn.Parameter
        assert torch.equal(p.detach(), expected)
        assert (p.grad is None) == (offsets == "cached")
