"""Claims about momentum that a solver takes over from another one."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import halp
from halp.optim import LPSGD, LPSVRG, SGD, SVRG, BitCenterSGD, BitCenterSVRG

ALL = [SGD, LPSGD, SVRG, LPSVRG, BitCenterSGD, BitCenterSVRG]
DATA = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) % 3
LOADER = [(DATA[:6], LABELS[:6]), (DATA[6:], LABELS[6:])]


def problem() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def solver(kind, model, momentum=0.9, **options):
    options = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.01} | options
    if kind in (BitCenterSGD, BitCenterSVRG):
        halp.bit_center(model, rounding=options.pop("rounding", "near"))
    if kind not in (SGD, LPSGD):
        options["T"] = 4
    return kind(model.parameters(), **options)


def step(model, optimizer, x, y):
    def loss_of(x, y):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    if optimizer.snapshot_due:
        optimizer.snapshot(LOADER, loss_of)
    optimizer.step(lambda: loss_of(x, y))


def buffers_like(model):
    random = torch.Generator().manual_seed(2)
    return {p: torch.randn(p.shape, generator=random) / 3 for p in model.parameters()}


@pytest.mark.parametrize("kind", ALL)
def test_every_solver_takes_it_and_its_next_step_feels_it(kind):
    moved = []
    for loads in (False, True):
        model = problem()
        optimizer = solver(kind, model)
        before = [halp.value(p) for p in model.parameters()]
        buffers = buffers_like(model)
        if loads:
            optimizer.load_momentum(buffers)
        step(model, optimizer, *LOADER[0])
        moved.append([halp.value(p) - b for p, b in zip(model.parameters(), before, strict=True)])
    for without, with_it, buffer in zip(*moved, buffers.values(), strict=True):
        # w moves by -lr (m buf + v): the difference is -lr m buf, up to fp16's roundoff.
        torch.testing.assert_close(with_it - without, -0.09 * buffer, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", [LPSGD, LPSVRG, BitCenterSGD, BitCenterSVRG])
def test_low_precision_solvers_hold_it_on_their_grid(kind):
    model = problem()
    optimizer = solver(kind, model)
    buffers = buffers_like(model)
    optimizer.load_momentum(buffers)
    for p, buffer in buffers.items():
        held = optimizer.state[p]["momentum_buffer"]
        scale = "auto" if optimizer.moves_deltas else None
        assert torch.equal(held, halp.quantize(buffer, "fp16", scale=scale))
        assert not torch.equal(held, buffer)


@pytest.mark.parametrize("kind", [SGD, SVRG])
def test_full_precision_solvers_hold_a_copy_of_it(kind):
    model = problem()
    optimizer = solver(kind, model)
    buffers = buffers_like(model)
    optimizer.load_momentum(buffers)
    for p, buffer in buffers.items():
        held = optimizer.state[p]["momentum_buffer"]
        assert torch.equal(held, buffer)
        assert held.data_ptr() != buffer.data_ptr()


def test_it_takes_the_dtype_of_the_parameter():
    model = problem().double()
    optimizer = solver(SGD, model)
    optimizer.load_momentum({p: torch.zeros(p.shape) for p in model.parameters()})
    step(model, optimizer, LOADER[0][0].double(), LOADER[0][1])
    held = [optimizer.state[p]["momentum_buffer"].dtype for p in model.parameters()]
    assert set(held) == {torch.float64}


@pytest.mark.parametrize("kind", [LPSGD, BitCenterSVRG])
def test_loading_uses_up_no_random_bits(kind):
    model = problem()
    optimizer = solver(kind, model, rounding="stoc")
    rounder = optimizer._rounder(next(model.parameters()))
    optimizer.load_momentum(buffers_like(model))
    assert rounder.position == 0


def test_frozen_parameters_and_groups_without_momentum_take_none():
    model = problem()
    model[0].bias.requires_grad_(False)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "momentum": 0.0}]
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    optimizer.load_momentum(buffers_like(model))
    held = [p for p in model.parameters() if "momentum_buffer" in optimizer.state.get(p, {})]
    assert len(held) == 1
    assert held[0] is model[0].weight


def test_parameters_without_a_buffer_start_anew():
    model = problem()
    optimizer = solver(SGD, model)
    weight = model[0].weight
    optimizer.load_momentum({weight: torch.ones_like(weight)})
    assert [p for p in optimizer.state if "momentum_buffer" in optimizer.state[p]] == [weight]
    step(model, optimizer, *LOADER[0])


@pytest.mark.parametrize("kind", [SGD, BitCenterSVRG])
def test_another_shape_and_another_models_parameter_are_refused_and_nothing_is_loaded(kind):
    model = problem()
    optimizer = solver(kind, model)
    weight, bias = list(model.parameters())[:2]
    with pytest.raises(ValueError, match=r"shape \(3,\) does not fit a parameter of shape \(4,\)"):
        optimizer.load_momentum({weight: torch.zeros(4, 5), bias: torch.zeros(3)})
    stranger = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=f"no parameter of this {kind.__name__}"):
        optimizer.load_momentum({weight: torch.zeros(4, 5), stranger: torch.zeros(2)})
    assert not any("momentum_buffer" in state for state in optimizer.state.values())
