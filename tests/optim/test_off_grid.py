"""What low-precision updates read lies on the grid, however it was written to before."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import halp
from halp import emulate, quantize
from halp.optim import LPSGD, LPSVRG, BitCenterSGD, BitCenterSVRG
from tests.block_views import spread

X = torch.tensor([[1.0, -0.5, 2.0, 0.25], [0.5, 1.0, -1.0, 1.5]])
OFF = 3.3  # not in bf16


def by_numpy(x):
    x.detach().numpy()[...] = OFF


def by_data(x):
    x.data.fill_(OFF)


def by_new_data(x):
    x.data = torch.full_like(x, OFF)


def in_place(x):
    with torch.no_grad():
        x.fill_(OFF)


WRITES = [by_numpy, by_data, by_new_data, in_place]
write_by = pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
lp_solvers = pytest.mark.parametrize("solver", [LPSGD, LPSVRG])


class Run:
    """A linear layer without bias, and a solver with momentum."""

    def __init__(self, solver, format="bf16", rounding="near", momentum=0.5, lr=0.125):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3, bias=False)
        options = {} if solver is LPSGD else {"T": 100}
        if solver in (LPSGD, LPSVRG):
            options |= {"format": format, "rounding": rounding}
        else:
            halp.bit_center(self.model, format, rounding)
        self.optimizer = solver(self.model.parameters(), lr=lr, momentum=momentum, **options)
        self.weight = self.model.weight
        self.snapshot()

    def closure(self, x=X):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def snapshot(self):
        self.optimizer.snapshot([(X,)], self.closure)

    def step(self):
        self.optimizer.step(self.closure)

    def buffer(self):
        return self.optimizer.state[self.weight]["momentum_buffer"]


def is_on_grid(x):
    return torch.equal(x, x.bfloat16().float())


@write_by
@lp_solvers
def test_weights_written_to_between_steps_are_rounded_first(solver, write):
    """The twin's weights were written to on the grid."""
    run, twin = Run(solver), Run(solver)
    for r in (run, twin):
        r.step()
    write(run.weight)
    with torch.no_grad():
        twin.weight.copy_(quantize(torch.full((3, 4), OFF), "bf16"))
    for r in (run, twin):
        r.step()
    assert torch.equal(run.weight, twin.weight)
    assert torch.equal(run.buffer(), twin.buffer())


@lp_solvers
def test_weights_written_to_inside_the_closure_are_rounded_first(solver):
    """With lr = 0 the update leaves the iterate that it reads, rounded once."""
    run = Run(solver, "bf16", "up", momentum=0.0, lr=0.0)

    def closure():
        loss = run.closure()
        by_numpy(run.weight)
        return loss

    run.optimizer.step(closure)
    assert torch.equal(run.weight, quantize(torch.full((3, 4), OFF), "bf16"))
    assert not torch.equal(run.weight, quantize(torch.full((3, 4), OFF), "bf16", "up"))


@write_by
def test_a_snapshot_is_of_weights_on_the_grid(write):
    run = Run(LPSVRG)
    write(run.weight)
    run.snapshot()
    assert is_on_grid(run.optimizer.state[run.weight]["snapshot"])
    assert is_on_grid(run.weight)


@pytest.mark.parametrize("write", [by_numpy, by_data, in_place], ids=lambda f: f.__name__)
@pytest.mark.parametrize("solver", [LPSGD, LPSVRG, BitCenterSGD, BitCenterSVRG])
def test_momentum_written_to_is_rounded_first(solver, write):
    run, twin = Run(solver), Run(solver)
    for r in (run, twin):
        r.step()
    write(run.buffer())
    scale = "auto" if solver in (BitCenterSGD, BitCenterSVRG) else None
    twin.buffer().copy_(quantize(torch.full((3, 4), OFF), "bf16", scale=scale))
    for r in (run, twin):
        r.step()
    assert torch.equal(run.buffer(), twin.buffer())
    assert torch.equal(halp.value(run.weight), halp.value(twin.weight))


@pytest.mark.parametrize("write", [by_numpy, by_data, in_place], ids=lambda f: f.__name__)
@pytest.mark.parametrize("solver", [BitCenterSGD, BitCenterSVRG])
def test_a_delta_written_to_is_rounded_first(solver, write):
    run, twin = Run(solver), Run(solver)
    for r in (run, twin):
        r.step()
    write(run.weight.delta)
    twin.weight.delta.copy_(quantize(torch.full((3, 4), OFF), "bf16", scale="auto"))
    for r in (run, twin):
        r.step()
    assert torch.equal(run.weight.delta, twin.weight.delta)


def test_a_delta_written_to_lies_on_the_grid_of_its_own_scale():
    model = halp.bit_center(nn.Linear(4, 3, bias=False), "fixed8", "stoc")
    optimizer = BitCenterSVRG(model.parameters(), lr=0.0, T=100, mu=1.0)

    def closure(x=X):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.snapshot([(X,)], closure)
    scale = optimizer.state[model.weight]["scale"]
    model.weight.delta.fill_(2.3 * scale)
    optimizer.step(closure)
    assert torch.equal(model.weight.delta, torch.full((3, 4), 2.0) * scale)


def test_momentum_of_torch_sgd_is_rounded_before_it_is_used():
    weight = nn.Parameter(torch.ones(4))
    plain = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    weight.grad = torch.full((4,), OFF)
    plain.step()
    ours = LPSGD([nn.Parameter(torch.ones(4))], lr=0.0, momentum=1.0, format="bf16", rounding="up")
    ours.load_state_dict({**plain.state_dict(), "param_groups": ours.state_dict()["param_groups"]})
    (parameter,) = ours.param_groups[0]["params"]
    parameter.grad = torch.zeros(4)
    ours.step()
    to_nearest = quantize(torch.full((4,), OFF), "bf16")
    assert torch.equal(ours.state[parameter]["momentum_buffer"], to_nearest)


@pytest.mark.parametrize("solver", [LPSGD, LPSVRG, BitCenterSGD, BitCenterSVRG])
def test_looking_at_everything_with_numpy_changes_nothing(solver):
    runs = [Run(solver, "fp8_e4m3", "stoc") for _ in range(2)]
    for _ in range(3):
        runs[0].step()
        for r in runs[0:1]:
            tensors = [halp.value(r.weight), r.buffer()]
            if solver in (BitCenterSGD, BitCenterSVRG):
                tensors += [r.weight.offset, r.weight.delta]
            for x in tensors:
                np.asarray(x.detach()).sum()
        runs[1].step()
    assert torch.equal(halp.value(runs[0].weight), halp.value(runs[1].weight))


def test_weights_on_the_grid_are_not_written_to():
    """Their version stays: PyTorch would refuse the backward pass of an earlier forward pass."""
    run = Run(LPSGD, lr=0.0)
    with torch.no_grad():
        run.weight.copy_(quantize(run.weight, "bf16"))
    version = run.weight._version
    run.optimizer._put_on_grid()
    assert run.weight._version == version


def test_a_copied_solver_goes_on_alike():
    run = Run(LPSGD)
    run.step()
    twin = copy.deepcopy(run)
    for r in (run, twin):
        by_numpy(r.weight)
        r.step()
    assert torch.equal(run.weight, twin.weight)
    assert is_on_grid(twin.weight)


@pytest.mark.parametrize("solver", [LPSGD, LPSVRG])
def test_the_update_reads_gradients_in_blocks_of_the_parameter(solver):
    """Of a weight that is used as a view, the gradient has that view's blocks."""
    weight = nn.Parameter(quantize(spread(4, 64), "mxfp4"))
    options = {"T": 9} if solver is LPSVRG else {}
    optimizer = solver([weight], lr=1.0, format="mxfp4", **options)
    x = spread(16, 16, seed=1)

    def closure(*_):
        optimizer.zero_grad()
        loss = (weight.view(16, 16) * x).sum()
        loss.backward()
        return loss

    optimizer.snapshot([(x,)], closure)
    with emulate("mxfp4"):
        closure()
    raw = weight.grad.clone()
    if solver is LPSVRG:  # of whose gradient this is one of three terms
        optimizer.state[weight]["full_gradient"].zero_()
        optimizer._gradients_at_snapshot = {}
    read = optimizer._gradient(weight, optimizer.param_groups[0])
    assert not torch.equal(quantize(raw, "mxfp4"), raw)
    assert torch.equal(read, quantize(raw, "mxfp4"))
