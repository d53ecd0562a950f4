"""A bit-centered forward and backward pass compiles whole, and agrees with eager."""

import copy
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F  # noqa: N812

import halp
from tests.rarely import rarely_but

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(
                not (shutil.which("g++") or shutil.which("clang++")),
                reason="inductor needs a C++ compiler, and there is none",
            ),
        ],
    ),
]
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


def model_with_deltas(activation: type[nn.Module], **options) -> nn.Module:
    torch.manual_seed(0)
    model = halp.bit_center(
        nn.Sequential(
            nn.Linear(20, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 5)
        ),
        **options,
    )
    for p in model.parameters():
        p.delta.copy_(halp.quantize(1e-3 * torch.randn(p.shape), "fp16", scale="auto"))
    return model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", rarely_but(["relu"], ACTIVATIONS))
def test_forward_and_backward_compile_whole_and_agree_with_eager(backend, activation):
    torch._dynamo.reset()
    eager, compiled = (model_with_deltas(ACTIVATIONS[activation]) for _ in range(2))
    x, y = torch.randn(16, 20), torch.randint(0, 5, (16,))

    @torch.compile(fullgraph=True, backend=backend)
    def loss_of(x, y):
        return F.cross_entropy(compiled(x), y)

    F.cross_entropy(eager(x), y).backward()
    loss = loss_of(x, y)
    loss.backward()
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        # Apart at most by where a float32 sum in another order rounds to fp16.
        assert (p.grad.delta - q.grad.delta).norm() <= 5e-4 * p.grad.delta.norm()
        assert torch.allclose(p.grad.offset, q.grad.offset, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_convolutional_net_with_batch_norm_compiles_whole_and_agrees_with_eager(backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )
    compiled = copy.deepcopy(eager)
    for model in (eager, compiled):
        halp.bit_center(model)
        torch.manual_seed(1)
        for p in model.parameters():
            p.delta.copy_(halp.quantize(1e-3 * torch.randn(p.shape), "fp16", scale="auto"))
    x, y = torch.randn(8, 2, 8, 8), torch.randint(0, 5, (8,))

    @torch.compile(fullgraph=True, backend=backend)
    def loss_of(x, y):
        return F.cross_entropy(compiled(x), y)

    F.cross_entropy(eager(x), y).backward()
    loss_of(x, y).backward()
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert (p.grad.delta - q.grad.delta).norm() <= 2e-3 * p.grad.delta.norm()
        assert torch.allclose(p.grad.offset, q.grad.offset, rtol=1e-4, atol=1e-6)
    for b, c in zip(eager.buffers(), compiled.buffers(), strict=True):
        assert torch.allclose(b, c, rtol=1e-5)


def test_compiled_code_follows_the_parameters_without_recompiling():
    torch._dynamo.reset()
    model = model_with_deltas(nn.Tanh)
    x, y = torch.randn(16, 20), torch.randint(0, 5, (16,))
    counter = CompileCounterWithBackend("aot_eager")
    loss_of = torch.compile(lambda: F.cross_entropy(model(x), y), fullgraph=True, backend=counter)
    optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.1, T=3)

    def closure(*_):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    losses = []
    for _ in range(9):
        if optimizer.snapshot_due:
            optimizer.snapshot([(x, y)], closure)
        losses.append(optimizer.step(closure).item())
    assert losses == sorted(losses, reverse=True)
    assert counter.frame_count == 2  # one graph for snapshots, one for inner steps


def test_stochastic_rounding_says_that_it_cannot_be_compiled_yet():
    torch._dynamo.reset()
    model = model_with_deltas(nn.Tanh, rounding="stoc")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="cannot be compiled yet"):
        compiled(torch.randn(16, 20))
