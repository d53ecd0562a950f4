"""Running statistics of batch normalization take one step per training step, at the iterate."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halp

T, STEPS = 4, 11
SOLVERS = {
    "sgd": (halp.optim.SGD, {}),
    "lp-sgd": (halp.optim.LPSGD, {"rounding": "void"}),
    "svrg": (halp.optim.SVRG, {"T": T}),
    "lp-svrg": (halp.optim.LPSVRG, {"T": T, "rounding": "void"}),
    "bc-sgd": (halp.optim.BitCenterSGD, {"T": T}),
    "bc-svrg": (halp.optim.BitCenterSVRG, {"T": T}),
}


def network(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8, bias=False),
        nn.BatchNorm1d(8, momentum=momentum),
        nn.Linear(8, 3),
    ).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 2, 6, 6, dtype=torch.float64, generator=generator),
            torch.randint(3, (n,), generator=generator),
        )
        for n in (8, 8, 5)
    ]


def update_by_hand(twin: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Let a plain copy of the model, at its present value, see a batch once."""
    with torch.no_grad():
        for p, plain in zip(model.parameters(), twin.parameters(), strict=True):
            plain.copy_(halp.value(p))
        twin(x)


def train(solver: str, model: nn.Module, twin: nn.Module, **options: Any) -> None:
    make, solver_options = SOLVERS[solver]
    if solver.startswith("bc"):
        halp.bit_center(model, **{"rounding": "void", **options})
    if "T" in solver_options:
        solver_options = {**solver_options, "buffers": model.buffers()}
    optimizer = make(model.parameters(), lr=0.1, momentum=0.5, weight_decay=1e-3, **solver_options)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    data = batches()
    for step in range(STEPS):
        if optimizer.snapshot_due:
            optimizer.snapshot(data, loss_of)
        x, y = data[step % len(data)]
        update_by_hand(twin, model, x)
        optimizer.step(lambda x=x, y=y: loss_of(x, y))


@pytest.mark.parametrize("momentum", [0.1, None], ids=["momentum", "cumulative"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_statistics_are_those_of_one_update_a_step(solver, momentum):
    model = network(momentum)
    twin = copy.deepcopy(model)
    train(solver, model, twin)
    for (name, computed), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        if name.endswith("num_batches_tracked"):
            assert computed == expected == STEPS
        else:
            assert (computed - expected).norm() <= 1e-12 * expected.norm(), name
            assert (computed - network().state_dict()[name]).norm() > 0.01


def test_in_fp16_statistics_are_of_the_full_value_and_not_rounded():
    model = network()
    twin = copy.deepcopy(model)
    train("bc-svrg", model, twin, rounding="near", format="fp16")
    for (name, computed), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert (computed - expected).double().norm() <= 2e-3 * expected.double().norm(), name
        if not name.endswith("num_batches_tracked"):
            assert not torch.equal(halp.quantize(computed, "fp16", scale="auto"), computed)


def test_statistics_of_float32_follow_offsets_of_float64():
    model = network().float()
    halp.bit_center(model, offset_dtype=torch.float64)
    (x, _), *_ = batches()
    model(x.float())
    fresh = network().float()
    fresh(x.float())
    assert model[1].running_mean.dtype == torch.float32
    for computed, expected in zip(model.buffers(), fresh.buffers(), strict=True):
        torch.testing.assert_close(computed, expected)


def test_evaluation_leaves_statistics_alone_and_uses_them():
    model = network()
    twin = copy.deepcopy(model)
    halp.bit_center(model, rounding="void").eval()
    buffers = [b.clone() for b in model.buffers()]
    (x, _), *_ = batches()
    torch.testing.assert_close(halp.value(model(x)), twin.eval()(x), rtol=1e-12, atol=1e-12)
    assert all(map(torch.equal, buffers, model.buffers()))


def test_a_batch_with_one_value_a_channel_is_refused_as_in_pytorch():
    model = halp.bit_center(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3))


def test_a_plain_model_in_another_dtype_has_its_statistics_in_it_too():
    model = network().float()
    (x, _), *_ = batches()
    twin = copy.deepcopy(model).double()
    halp.bit_center(model)
    with halp.materialize(model, dtype=torch.float64):
        torch.testing.assert_close(model(x), twin(x))
        assert model[1].running_mean.dtype == torch.float64
    assert model[1].running_mean.dtype == torch.float32
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean.float())
    halp.to_plain(model, dtype=torch.float64)
    torch.testing.assert_close(model(x), twin(x), rtol=1e-6, atol=1e-6)
