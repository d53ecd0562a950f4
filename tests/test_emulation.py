"""Under ``emulate`` a plain model computes what low-precision hardware would, and nothing else."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halp
from halp import emulate

aten = torch.ops.aten

#: Rounding by the casts of PyTorch: an independent oracle within the formats' ranges.
CASTS = {
    "fp16": lambda x: x.to(torch.float16).to(x.dtype),
    "bf16": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "fp8_e4m3": lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype),
}
half = CASTS["fp16"]


def on_grid(x: torch.Tensor, format: str = "fp16") -> bool:
    return torch.equal(CASTS[format](x.detach()), x.detach())


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(layers) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*layers())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


class Spy(TorchDispatchMode):
    """Notes every operation with its tensors; inside ``emulate`` it sees what emulate returns."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and not func.is_view:
                if "empty" not in str(func):
                    self.results.append((str(func), x.detach().clone()))
        return result


# --- twins


@pytest.mark.parametrize("format", CASTS)
def test_a_network_is_its_twin_that_rounds_every_operation_in_the_list(format):
    """Softmax regression on a hidden tanh layer; the operations are those that autograd calls."""
    q = CASTS[format]
    model = make(lambda: (nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 10)))
    x, y = randn(32, 20), torch.arange(32) % 10
    with emulate(format):
        loss = F.cross_entropy(model(x), y)
        loss.backward()

    w1, b1, w2, b2 = (q(p.detach()) for p in model.parameters())
    x = q(x)
    with torch.no_grad():
        hidden = q(torch.tanh(q(torch.addmm(b1, x, w1.t()))))
        logits = q(torch.addmm(b2, hidden, w2.t()))
        log_p = q(aten._log_softmax(logits, 1, False))
        twin_loss, total = (q(r) for r in aten.nll_loss_forward(log_p, y, None, 1, -100))
        d_log_p = q(aten.nll_loss_backward(torch.tensor(1.0), log_p, y, None, 1, -100, total))
        d_logits = q(aten._log_softmax_backward_data(d_log_p, log_p, 1, torch.float32))
        d_w2, d_b2 = q(torch.mm(d_logits.t(), hidden)), q(d_logits.sum(0))
        d_preactivation = q(aten.tanh_backward(q(torch.mm(d_logits, w2)), hidden))
        d_w1, d_b1 = q(torch.mm(d_preactivation.t(), x)), q(d_preactivation.sum(0))

    assert torch.equal(loss, twin_loss)
    for ours, twin in zip(gradients(model), (d_w1, d_b1, d_w2, d_b2), strict=True):
        assert torch.equal(ours, twin)
        assert twin.count_nonzero() > 0


def test_least_squares_is_a_numpy_float16_twin():
    """Small integers over powers of two: products and their sums are exact before rounding."""
    rng = np.random.default_rng(0)
    x, w, y = (rng.integers(-31, 32, shape) / 32 for shape in ((64, 12), (12, 3), (64, 3)))
    tensors = [torch.tensor(a, dtype=torch.float64) for a in (x, w, y)]
    tensors[1].requires_grad_()
    with emulate("fp16"):
        residual = tensors[0] @ tensors[1] - tensors[2]
        loss = (residual * residual).sum()
        loss.backward()

    product = (x @ w).astype(np.float16)
    difference = (product.astype(np.float64) - y).astype(np.float16)
    square = (difference.astype(np.float64) ** 2).astype(np.float16)
    assert loss.item() == square.astype(np.float64).sum().astype(np.float16)
    once = difference.astype(np.float64)  # d(r·r) arrives as r + r, from one factor and the other
    gradient = (x.T @ (once + once).astype(np.float16).astype(np.float64)).astype(np.float16)
    assert (tensors[1].grad.numpy() == gradient).all()
    assert not (gradient == x.T @ (2 * (x @ w - y))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_result_is_rounded_once_from_the_dtype_of_the_tensors(dtype):
    a, b = randn(1000).to(dtype), randn(1000, seed=1).to(dtype)
    with emulate("fp8_e4m3"):
        result = a * b
    assert result.dtype == dtype
    q = CASTS["fp8_e4m3"]
    if dtype == torch.float64:  # not by torch's cast, which goes through float32
        q = lambda x: halp.quantize(x, "fp8_e4m3")  # noqa: E731
    assert torch.equal(result, q(q(a) * q(b)))


NETWORKS = {
    "batch norm net": (
        lambda: (
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, bias=False),
            nn.GroupNorm(2, 4),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(4, 3),
        ),
        (8, 2, 12, 12),
    ),
    "activations": (
        lambda: (
            nn.Linear(6, 8),
            nn.LayerNorm(8),
            nn.GELU(),
            nn.Linear(8, 8),
            nn.Softplus(),
            nn.Sigmoid(),
            nn.RReLU(),
            nn.Linear(8, 3),
        ),
        (8, 6),
    ),
}


@pytest.mark.parametrize("scale", [None, "auto"])
@pytest.mark.parametrize("format", ["fp16", "fp8_e4m3"])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_result_is_on_the_grid_forward_and_backward(network, format, scale):
    layers, shape = NETWORKS[network]
    model, x, y = make(layers), randn(*shape), torch.arange(8) % 3
    with emulate(format, scale=scale), Spy() as spy:
        F.cross_entropy(model(x), y).backward()
    assert len(spy.results) > 20
    for name, result in spy.results:
        assert torch.equal(halp.quantize(result, format, scale=scale), result), name
    for gradient in gradients(model):
        assert torch.equal(halp.quantize(gradient, format, scale=scale), gradient)


def test_an_lstm_tagger_runs_and_its_gradients_are_on_the_grid():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        embedding, lstm, output = nn.Embedding(9, 4), nn.LSTM(4, 5), nn.Linear(5, 3)
    with emulate("fp16"):
        states, _ = lstm(embedding(torch.arange(14).view(7, 2) % 9))
        loss = F.cross_entropy(output(states).view(-1, 3), torch.arange(14) % 3)
        loss.backward()
    for layer in (embedding, lstm, output):
        for p in layer.parameters():
            assert on_grid(p.grad)
            assert p.grad.count_nonzero() > 0


# --- where it applies


def test_void_changes_nothing_bit_for_bit():
    layers, shape = NETWORKS["batch norm net"]
    models = [make(layers) for _ in range(2)]
    x, y = randn(*shape), torch.arange(8) % 3
    losses = []
    for model, context in zip(
        models, (emulate("fp8_e4m3", "void"), torch.enable_grad()), strict=True
    ):
        with torch.random.fork_rng(), context:
            torch.manual_seed(3)
            losses.append(F.cross_entropy(model(x), y))
            losses[-1].backward()
    assert torch.equal(*losses)
    for ours, plain in zip(gradients(models[0]), gradients(models[1]), strict=True):
        assert torch.equal(ours, plain)
    for ours, plain in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.equal(ours, plain)


def test_backward_is_rounded_inside_the_block_only():
    x, w = randn(50, 20), randn(20, seed=1).requires_grad_()
    with emulate("fp16"):
        loss = (x @ w).pow(2).sum()
        loss.backward(retain_graph=True)
    assert on_grid(w.grad)
    w.grad = None
    loss.backward()
    assert not on_grid(w.grad)


def test_nothing_is_rounded_after_the_block():
    x = randn(100)
    with emulate("fp16"):
        x * 3
    assert not on_grid(x * 3)


def test_an_exception_inside_the_block_leaves_the_mode():
    x = randn(100)
    with pytest.raises(RuntimeError, match="on purpose"), emulate("fp16"):
        raise RuntimeError("on purpose")
    with pytest.raises(RuntimeError), emulate("fp16"):
        x @ randn(3)
    assert not on_grid(x * 3)


def test_an_inner_block_decides_and_the_outer_one_continues():
    x = randn(100)
    coarse = CASTS["fp8_e4m3"]
    with emulate("fp16"):
        with emulate("fp8_e4m3"):
            inner = x * 3
        outer = x * 3
    assert torch.equal(inner, coarse(coarse(x) * 3))
    assert torch.equal(outer, half(half(x) * 3))


@pytest.mark.parametrize("rounding", ["near", "stoc"])
def test_nesting_the_same_format_changes_nothing(rounding):
    x = randn(100)
    with emulate("fp16", rounding):
        once = x * 3
    with emulate("fp16"), emulate("fp16", rounding):
        twice = x * 3
    assert torch.equal(once, twice)


def test_a_block_can_be_entered_again():
    x, context = randn(100), emulate("fp16")
    results = []
    for _ in range(2):
        with context:
            results.append(x * 3)
    with context:
        with context:
            results.append(x * 3)
        results.append(x * 3)
    for result in results:
        assert torch.equal(result, half(half(x) * 3))
    assert not on_grid(x * 3)


def test_inference_mode_and_no_grad_round_alike():
    model, x = make(lambda: (nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))), randn(3, 5)
    results = []
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context(), emulate("fp16"):
            results.append(model(x).detach().clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("fp17",), "unknown format 'fp17'"),
        (("fp16", "up!"), "unknown rounding 'up!'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        emulate(*arguments)
    with pytest.raises(ValueError, match="scale must be"):
        emulate("fp16", scale=-1)


@pytest.mark.parametrize(
    "operation",
    [
        lambda model: model(torch.ones(2, 3)),
        lambda model: model.weight + 1,
        lambda model: model.bias.mul_(2),
        lambda model: torch.cat([model.weight, model.weight]),
    ],
    ids=["forward", "operator", "in place", "in a list"],
)
def test_a_bit_centered_model_inside_is_refused_in_a_sentence(operation):
    model = halp.bit_center(nn.Linear(3, 2))
    with torch.no_grad(), emulate("fp16"):
        message = r"emulate\(\) rounds plain models; .*halp.to_plain"
        with pytest.raises((TypeError, RuntimeError), match=message):
            operation(model)
    halp.to_plain(model)
    with emulate("fp16"):
        result = model(randn(2, 3))
    assert on_grid(result)


# --- what it leaves alone


def test_views_share_memory_and_are_not_rounded():
    x = randn(4, 6)
    before = x.clone()
    with emulate("fp16"):
        views = [x.t(), x[1:], x.view(-1), x.unsqueeze(0), x.detach(), x.expand(2, 4, 6), x[:, ::2]]
    for view in views:
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(x, before)


def test_integers_and_booleans_are_exact():
    big = torch.tensor([2049, 4097, 123456789])
    with emulate("fp16"):
        double, total, many, large = big + big, big.sum(), torch.arange(5000), big > 4096
    assert double.tolist() == [4098, 8194, 246913578]
    assert total.item() == 123462935
    assert many[-1].item() == 4999
    assert large.tolist() == [False, True, True]


def test_parameters_and_inputs_are_not_modified_by_a_pass():
    model = make(lambda: (nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = randn(3, 5)
    tensors = [*model.parameters(), x]
    before = [(t.detach().clone(), t._version) for t in tensors]
    with emulate("fp8_e4m3"):
        model(x).sum().backward()
    for tensor, (old, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)
        assert tensor._version == version


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_stay_in_high_precision(affine, momentum):
    layer = nn.BatchNorm1d(3, affine=affine, momentum=momentum)
    x, plain = randn(16, 3), copy.deepcopy(layer)
    for _ in range(3):
        plain(half(x))
        with emulate("fp16"):
            layer(x)
    assert not on_grid(layer.running_mean)
    assert torch.equal(layer.running_mean, plain.running_mean)
    assert torch.equal(layer.running_var, plain.running_var)
    assert layer.num_batches_tracked == 3
    layer.eval(), plain.eval()
    with emulate("fp16"):
        result = layer(x)
    assert torch.equal(result, half(plain(half(x))))


@pytest.mark.xfail(strict=True, reason="instance norm updates them by operations of its own")
def test_running_statistics_of_instance_norm_stay_in_high_precision():
    layer = nn.InstanceNorm1d(3, track_running_stats=True)
    x, plain = randn(8, 3, 5), copy.deepcopy(layer)
    plain(half(x))
    with emulate("fp16"):
        layer(x)
    assert torch.equal(layer.running_var, plain.running_var)


@pytest.mark.parametrize("count", [1000, 1 << 17])
def test_the_number_of_samples_of_a_mean_loss_is_not_rounded(count):
    """131072 saturates fp16: rounded to 65504, it would double every gradient."""
    log_p = torch.full((count, 2), -1.0, requires_grad=True)
    with emulate("fp16"):
        F.nll_loss(log_p, torch.zeros(count, dtype=torch.long)).backward()
    expected = half(torch.tensor(-1 / count))
    assert torch.equal(log_p.grad[:, 0], expected.expand(count))


# --- operations that write, and lists


def test_an_operation_in_place_is_one_kernel():
    """It reads its operands on the grid, the one that it writes to included."""
    x, y = randn(100), randn(100, seed=1)
    a, b, c = x.clone(), x.clone(), x.clone()
    with emulate("fp16"):
        result = a.mul_(3)
        b.add_(y)
        c += c
    assert result is a
    assert torch.equal(a, half(half(x) * 3))
    assert torch.equal(b, half(half(x) + half(y)))
    assert torch.equal(c, half(half(x) + half(x)))


def test_writing_to_a_part_leaves_the_rest_alone():
    x = randn(4, 5)
    before = x.clone()
    with emulate("fp16"):
        x[1] = 0.1
        x[2].copy_(before[3])
    assert torch.equal(x[1], half(torch.full((5,), 0.1)))
    assert torch.equal(x[2], half(before[3]))
    assert torch.equal(x[0], before[0])
    assert torch.equal(x[3], before[3])


def test_an_out_argument_is_rounded():
    x, out = randn(100), torch.empty(100)
    values, indices = torch.empty(()), torch.empty((), dtype=torch.long)
    with emulate("fp16"):
        returned = torch.mul(x, 3, out=out)
        torch.max(x, 0, out=(values, indices))
    assert returned is out
    assert torch.equal(out, half(half(x) * 3))
    assert torch.equal(values, half(x).max())
    assert half(x)[indices] == values


def test_foreach_operations_are_rounded():
    xs = [randn(10, seed=seed) for seed in range(3)]
    written = [half(x) for x in xs]
    with emulate("fp16"):
        products = torch._foreach_mul(xs, 3.0)
        torch._foreach_add_(written, xs, alpha=0.1)
    for x, product, sum in zip(xs, products, written, strict=True):
        assert torch.equal(product, half(half(x) * 3))
        assert torch.equal(sum, half(torch.add(half(x), half(x), alpha=0.1)))


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_step_inside_leaves_parameters_and_its_state_on_the_grid(foreach):
    model = make(lambda: (nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
    for _ in range(3):
        with emulate("fp16"):
            optimizer.zero_grad()
            model(randn(3, 5)).square().mean().backward()
            optimizer.step()
    for p in model.parameters():
        assert on_grid(p)
        assert on_grid(optimizer.state[p]["momentum_buffer"])


def test_lists_of_tensors_are_rounded():
    x, y = randn(10), randn(10, seed=1)
    with emulate("fp16"):
        joined, stacked = torch.cat([x, y]), torch.stack((x, y))
        first, second = joined.split(10)
        product = torch.dot(first, second)
    assert torch.equal(joined, half(torch.cat([x, y])))
    assert torch.equal(stacked, half(torch.stack((x, y))))
    assert torch.equal(product, half(torch.dot(half(x), half(y))))


def test_a_list_of_parameters_reads_rounded_values():
    xs = [randn(10), randn(10, seed=1)]
    with emulate("fp16"):
        norms = torch._foreach_norm(xs)
    for x, norm in zip(xs, norms, strict=True):
        assert torch.equal(norm, half(half(x).norm()))


def test_results_beside_a_written_argument_are_rounded():
    """``rrelu`` writes its noise and returns the activation."""
    with torch.random.fork_rng(), emulate("fp16"):
        torch.manual_seed(0)
        result = F.rrelu(randn(100), training=True)
    assert on_grid(result)


# --- memory that is written to between two reads


def scaled_by_data(x):
    x.data.mul_(2)


def assigned_by_data(x):
    x.data = x.detach() * 2


def written_through_a_slice(x):
    x.data[: len(x) // 2] *= 2


def written_under_no_grad(x):
    with torch.no_grad():
        x.mul_(2)


CHANGES = [scaled_by_data, assigned_by_data, written_through_a_slice, written_under_no_grad]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "between two blocks"])
def test_a_parameter_that_changed_enters_with_its_new_value(change, inside):
    x, context = nn.Parameter(randn(100)), emulate("fp16")
    with context:
        before = x * 1
        if inside:
            change(x)
            result = x * 1
    if not inside:
        change(x)
        with context:
            result = x * 1
    assert torch.equal(before, half(randn(100)))
    assert torch.equal(result, half(x))
    assert not torch.equal(result, half(randn(100)))


# --- scale and random bits


def test_auto_scale_is_that_of_each_tensor():
    """At 1e-9 fp16 has nothing left by itself."""
    x, w = randn(50, 20) * 1e-9, randn(20, seed=1).mul_(1e-6).requires_grad_()

    def q(t):
        """fp16 after multiplying by the power of two that brings the largest to 32752 … 65504."""
        factor = 2.0 ** math.floor(math.log2(65504 / t.abs().max().item()))
        return half(t * factor) / factor

    with emulate("fp16", scale="auto"):
        y = x @ w
        y.backward(torch.ones(50))
    assert torch.equal(y, q(q(x) @ q(w.detach())))
    assert torch.equal(w.grad, q(q(x).t() @ torch.ones(50)))
    assert w.grad.count_nonzero() == 20
    with emulate("fp16"):
        unscaled = x @ w
    assert unscaled.count_nonzero() == 0


def test_a_number_as_scale_applies_to_every_tensor():
    x = randn(100)
    with emulate("fp8_e4m3", scale=2.0**-6):
        result = x * 3

    def q(t):
        return CASTS["fp8_e4m3"](t * 64) / 64

    assert torch.equal(result, q(q(x) * 3))


def stochastic_pass(seed: int) -> list[torch.Tensor]:
    model, x = make(lambda: (nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))), randn(8, 20)
    with emulate("fp16", "stoc", seed=seed):
        loss = model(x).square().mean()
        loss.backward()
    return [loss.detach(), *gradients(model)]


def test_a_seed_repeats_a_stochastic_pass_bit_for_bit_whatever_the_global_generator_does():
    first = stochastic_pass(1)
    torch.rand(3)
    for ours, again in zip(first, stochastic_pass(1), strict=True):
        assert on_grid(ours)
        assert torch.equal(ours, again)
    assert not torch.equal(first[1], stochastic_pass(2)[1])


def test_every_operation_draws_its_own_random_bits():
    x = half(randn(1000))
    with emulate("fp16", "stoc"):
        first, second = x * 3, x * 3
    assert not torch.equal(first, second)


def test_stochastic_results_average_to_the_wide_one():
    x = half(randn(200))
    with emulate("fp16", "stoc"):
        results = torch.stack([x * 3 for _ in range(400)]).double()
    exact = x.double() * 3
    spacing = torch.exp2(exact.abs().log2().floor() - 10)
    error = (results.mean(0) - exact) / spacing  # of a choice between neighbours: σ ≤ 1/2
    assert error.abs().max() < 5 * 0.5 / math.sqrt(400)
    assert (results - exact).abs().max() > 0


def test_a_parameter_that_is_used_twice_enters_with_one_rounding():
    w = nn.Parameter(randn(30, 40))
    with emulate("fp16", "stoc"):
        first, second, viewed, transposed = w * 1, w * 1, w.view(40, 30) * 1, w.t() * 1
    assert torch.equal(first, second)
    assert torch.equal(viewed, first.view(40, 30))
    assert torch.equal(transposed, first.t())


def test_a_layer_that_is_used_twice_has_one_weight():
    layer, identity = nn.Linear(40, 30, bias=False), torch.eye(40)
    with emulate("fp16", "stoc"):
        first, second = layer(identity), layer(identity)
    assert torch.equal(first, second)


def test_backward_reads_the_rounded_weight_that_forward_read():
    layer = nn.Linear(40, 30, bias=False)
    x = torch.eye(40, requires_grad=True)
    with emulate("fp16", "stoc"):
        y = layer(x)
        y.backward(torch.eye(40, 30))
    assert torch.equal(x.grad[:30], y.detach().t())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_is_rounded_step_by_step(kind):
    """And not as the one operation that oneDNN makes of all time steps."""
    torch.manual_seed(0)
    layer, x = kind(6, 5), randn(7, 3, 6)
    cell = {nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell}[kind](6, 5)
    cell.load_state_dict({name.removesuffix("_l0"): w for name, w in layer.state_dict().items()})
    with emulate("fp8_e4m3"):
        output, _ = layer(x)
        state, expected = None, []
        for x_t in x:
            state = cell(x_t, state)
            expected.append(state[0] if kind is nn.LSTM else state)
        (gradient,) = torch.autograd.grad(output.square().sum(), layer.weight_hh_l0)
    assert torch.equal(output, torch.stack(expected))
    assert on_grid(output, "fp8_e4m3")
    assert on_grid(gradient, "fp8_e4m3")
    with torch.no_grad():
        assert not torch.equal(output, CASTS["fp8_e4m3"](layer(x)[0]))


def test_convolutions_keep_their_fast_kernels_inside():
    before = torch.backends.mkldnn.enabled
    with emulate("fp16"):
        assert torch.backends.mkldnn.enabled == before
        nn.LSTM(6, 5)(randn(7, 3, 6))
        assert torch.backends.mkldnn.enabled == before
