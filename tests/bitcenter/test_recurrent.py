"""Recurrent layers run through their cells, where every result has a delta of its own."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import halp
from halp.bitcenter import BitCenteredTensor
from tests.bitcenter.test_rules import bit_centering

LAYERS = {
    "lstm": lambda: nn.LSTM(6, 5),
    "lstm, two layers both ways": lambda: nn.LSTM(6, 5, 2, bidirectional=True),
    "lstm, batch first": lambda: nn.LSTM(6, 5, batch_first=True),
    "lstm, projected": lambda: nn.LSTM(6, 5, proj_size=3),
    "lstm, no bias": lambda: nn.LSTM(6, 5, bias=False),
    "gru": lambda: nn.GRU(6, 5),
    "gru, batch first": lambda: nn.GRU(6, 5, batch_first=True),
    "rnn": lambda: nn.RNN(6, 5),
    "rnn, relu": lambda: nn.RNN(6, 5, nonlinearity="relu"),
}


def gradients_of(layer: nn.Module, x: Tensor) -> list[Tensor]:
    output, _ = layer(x)
    weight = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    loss = (weight * output).sum() + output.square().sum()
    return list(torch.autograd.grad(loss, list(layer.parameters())))


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("size", [1e-1, 1e-4])
def test_a_recurrent_layer_is_the_plain_one_at_offset_and_full_value(make, size):
    torch.manual_seed(0)
    layer = make().double()
    twin, x = copy.deepcopy(layer), torch.randn(4, 3, 6, dtype=torch.float64)
    at_offset = gradients_of(twin, x)
    halp.bit_center(layer, rounding="void")
    for p, plain in zip(layer.parameters(), twin.parameters(), strict=True):
        p.delta.copy_(size * torch.randn_like(plain))
        plain.data += p.delta
    at_value = gradients_of(twin, x)
    computed = gradients_of(layer, x)
    for g, before, after in zip(computed, at_offset, at_value, strict=True):
        torch.testing.assert_close(g.offset, before, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(g.value, after, rtol=1e-12, atol=1e-14)
        assert (g.delta - (after - before)).norm() <= 1e-8 * (after - before).norm()


def fused() -> tuple[bool, bool]:
    return torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled


def test_fused_kernels_are_back_after_the_layer_even_if_it_fails():
    before = fused()
    layer = halp.bit_center(nn.LSTM(6, 5))
    layer(torch.randn(4, 3, 6))
    assert fused() == before
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 3, 7))
    assert fused() == before


def test_copies_and_pickles_of_a_layer_run_alike():
    torch.manual_seed(0)
    layer, x = halp.bit_center(nn.LSTM(6, 5)), torch.randn(4, 3, 6)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(halp.value(other(x)[0]), halp.value(layer(x)[0]))


def test_a_materialized_or_plain_layer_is_pytorchs_own():
    torch.manual_seed(0)
    layer, x = nn.LSTM(6, 5), torch.randn(4, 3, 6)
    with torch.no_grad():
        expected = layer(x)[0]
        halp.bit_center(layer)
        with halp.materialize(layer):
            assert torch.equal(layer(x)[0], expected)
        halp.to_plain(layer)
        assert torch.equal(layer(x)[0], expected)
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks


def test_the_fused_cell_that_cuda_uses_is_the_cell():
    """The CPU has no such operation; its rule is operations that the CPU has."""
    torch.manual_seed(0)
    shapes = [(3, 20), (3, 20), (3, 5), (20,), (20,)]
    offsets = [torch.randn(s, dtype=torch.float64) for s in shapes]
    deltas = [1e-3 * torch.randn(s, dtype=torch.float64) for s in shapes]

    def fused(*operands: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._thnn_fused_lstm_cell(*operands)[:2]

    def plain(a: Tensor, b: Tensor, c: Tensor, *biases: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (a + b + sum(biases)).chunk(4, 1)
        new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * new_c.tanh(), new_c

    def gradients(run, operands: list[Tensor], biases: int) -> list[Tensor]:
        operands = operands[: 3 + biases]
        h, c = run(*operands)
        loss = (h * h).sum() + (h + 3 * c * c).sum()
        return list(torch.autograd.grad(loss, operands))

    make = bit_centering()
    for biases in (0, 2):
        operands = [make(u, e).requires_grad_() for u, e in zip(offsets, deltas, strict=True)]
        computed = gradients(fused, operands, biases)
        for shift, part in ((0, "offset"), (1, "value")):
            at = [(u + shift * e).requires_grad_() for u, e in zip(offsets, deltas, strict=True)]
            for g, expected in zip(computed, gradients(plain, at, biases), strict=True):
                assert type(g) is BitCenteredTensor
                torch.testing.assert_close(getattr(g, part), expected, rtol=1e-10, atol=1e-12)


def test_a_fused_layer_called_directly_is_refused_by_name():
    layer = halp.bit_center(nn.LSTM(6, 5))
    weights = [getattr(layer, name) for name in layer._flat_weights_names]
    h = torch.zeros(1, 3, 5)
    with pytest.raises(NotImplementedError, match=r"mkldnn_rnn_layer.* no delta rule"):
        torch.lstm(torch.randn(4, 3, 6), (h, h), weights, True, 1, 0.0, True, False, False)


@pytest.mark.parametrize("offsets", ["on-site", "cached"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_the_full_gradient_is_the_plain_ones(make, offsets):
    """Also where a layer transposes its result in place."""
    torch.manual_seed(0)
    layer = make().double()
    twin, x = copy.deepcopy(layer), torch.randn(4, 3, 6, dtype=torch.float64)
    halp.bit_center(layer, rounding="void", offsets=offsets)
    optimizer = halp.optim.BitCenterSVRG(layer.parameters(), lr=0.1, T=5)

    def mean_over_steps(layer: nn.Module, x: Tensor) -> Tensor:
        loss = layer(x)[0].mean(1).square().sum()
        loss.backward()
        return loss

    optimizer.snapshot([x], lambda x: mean_over_steps(layer, x))
    mean_over_steps(twin, x)
    for p, plain in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[p]["full_gradient"], plain.grad)
