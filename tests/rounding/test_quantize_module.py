"""``Quantize``: rounding inside a network, with a gradient that passes through."""

import copy
import io
import math

import pytest
import torch
from torch import nn

import halp
from halp import Quantize, quantize
from tests.rounding.oracles import BLOCKS, MODES


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient_through(module: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    module(x).backward(upstream)
    return x.grad


X, UPSTREAM = normal(40, 33), normal(40, 33, seed=1)


@pytest.mark.parametrize("rounding", [*MODES, "void"])
@pytest.mark.parametrize("name", ["fp16", "fp8_e4m3", "fixed8", "e5m7", *BLOCKS])
def test_forward_is_quantize_and_the_gradient_passes_straight_through(name, rounding):
    module = Quantize(halp.Precision(name, rounding))
    assert torch.equal(module(X), quantize(X, name, rounding))
    assert torch.equal(gradient_through(module, X, UPSTREAM), UPSTREAM)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_are_kept_forward_and_backward(dtype):
    x, upstream = X.to(dtype), UPSTREAM.to(dtype)
    module = Quantize("fp8_e4m3", "fp8_e5m2")
    assert torch.equal(module(x), quantize(x, "fp8_e4m3"))
    gradient = gradient_through(module, x, upstream)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, quantize(upstream, "fp8_e5m2"))


def test_a_precision_says_how_to_round():
    precision = halp.Precision("fp8_e5m2", "near-away", "auto", "inf")
    x = X * 1e5
    expected = quantize(x, "fp8_e5m2", "near-away", scale="auto", overflow="inf")
    assert torch.equal(Quantize(precision)(x), expected)
    assert torch.equal(
        gradient_through(Quantize("fp16", precision), X, x),
        quantize(x, "fp8_e5m2", "near-away", scale="auto", overflow="inf"),
    )


def test_a_format_does_as_well_as_its_name():
    assert torch.equal(Quantize(halp.formats.get("fp8_e4m3"))(X), quantize(X, "fp8_e4m3"))


@pytest.mark.parametrize("backward", ["fp8_e5m2", "fixed8", "mxfp4"])
def test_the_gradient_is_rounded_to_the_backward_format(backward):
    gradient = gradient_through(Quantize("fp8_e4m3", backward), X, UPSTREAM)
    assert torch.equal(gradient, quantize(UPSTREAM, backward))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp4_e2m1", "fixed4"])
def test_clipping_zeroes_the_gradient_beyond_the_range_only(name):
    format = halp.formats.get(name)
    edges = [format.max, format.min, 0.0, format.max / 2]
    beyond = [math.nextafter(format.max, math.inf), math.nextafter(format.min, -math.inf)]
    beyond += [2 * format.max, 2 * format.min, math.inf, -math.inf]
    x = torch.tensor(edges + beyond, dtype=torch.float64)
    upstream = torch.arange(1.0, len(x) + 1, dtype=torch.float64)
    clipped = gradient_through(Quantize(name, clip_gradient=True), x, upstream)
    inside = torch.arange(len(x)) < len(edges)
    assert torch.equal(clipped, upstream * inside)
    assert torch.equal(gradient_through(Quantize(name), x, upstream), upstream)


def test_clipping_uses_the_range_on_the_scale():
    module = Quantize(halp.Precision("fixed4", scale=0.5), clip_gradient=True)
    x = torch.tensor([3.5, 3.6, -4.0, -4.1])
    assert gradient_through(module, x, torch.ones(4)).tolist() == [1, 0, 1, 0]


def test_nothing_is_clipped_on_a_scale_that_holds_everything():
    module = Quantize(halp.Precision("fixed4", scale="auto"), clip_gradient=True)
    assert torch.equal(gradient_through(module, X * 1e6, UPSTREAM), UPSTREAM)


def test_clipping_and_rounding_the_gradient_together():
    module = Quantize("fp4_e2m1", "fp8_e5m2", clip_gradient=True)
    x = X * 5
    expected = quantize(UPSTREAM, "fp8_e5m2") * (x.abs() <= 6)
    assert torch.equal(gradient_through(module, x, UPSTREAM), expected)


def test_the_input_is_left_alone():
    x = X.clone()
    Quantize("fp8_e4m3")(x).fill_(7)
    assert torch.equal(x, X)


# --- stochastic

HALFWAY = torch.full((100_000,), 1 + 2**-11)
STOCHASTIC = halp.Precision("fp16", "stoc")


def assert_uncorrelated(*results: torch.Tensor) -> None:
    signs = (torch.stack(results) > 1).double() * 2 - 1
    assert (signs.mean(1).abs() < 5 / math.sqrt(signs.shape[1])).all()
    correlation = signs @ signs.t() / signs.shape[1] - torch.eye(len(results))
    assert correlation.abs().max() < 5 / math.sqrt(signs.shape[1])


@pytest.fixture
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def test_every_call_of_every_instance_has_bits_of_its_own(seeded):
    first, second = Quantize(STOCHASTIC), Quantize(STOCHASTIC)
    with torch.no_grad():
        results = [module(HALFWAY) for _ in range(3) for module in (first, second)]
    assert_uncorrelated(*results)


def test_forward_and_backward_have_bits_of_their_own(seeded):
    """Those of one call too."""
    module, results = Quantize(STOCHASTIC, STOCHASTIC), []
    for _ in range(2):
        x = HALFWAY.clone().requires_grad_()
        y = module(x)
        y.backward(HALFWAY)
        results += [y.detach(), x.grad]
    assert_uncorrelated(*results)


def test_manual_seed_reproduces_a_whole_run():
    def run(seed: int) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = nn.Sequential(Quantize(STOCHASTIC, STOCHASTIC), Quantize(STOCHASTIC))
            return torch.stack([module(HALFWAY), gradient_through(module, HALFWAY, HALFWAY)])

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_a_restored_state_continues_with_the_same_bits(seeded):
    module = Quantize(STOCHASTIC, STOCHASTIC)
    module(HALFWAY)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    expected = [module(HALFWAY), gradient_through(module, HALFWAY, HALFWAY), module(HALFWAY)]
    buffer.seek(0)
    other = Quantize(STOCHASTIC, STOCHASTIC)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    actual = [other(HALFWAY), gradient_through(other, HALFWAY, HALFWAY), other(HALFWAY)]
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def test_a_deep_copy_continues_as_the_original_would(seeded):
    module = Quantize(STOCHASTIC)
    module(HALFWAY)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(HALFWAY), module(HALFWAY))


def test_rounding_moves_no_generator(seeded):
    module = Quantize(STOCHASTIC)
    state = torch.get_rng_state()
    module(HALFWAY)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stochastic_forward_is_unbiased(seeded, dtype):
    x = torch.full((1 << 18,), 1.2345, dtype=dtype)
    result = Quantize(STOCHASTIC)(x)
    low = 1.234375
    p = (x[0].item() - low) * 1024
    ups = (result > low).sum().item()
    assert abs(ups - len(x) * p) < 5 * math.sqrt(len(x) * p * (1 - p))


# --- compiled


def network() -> nn.Module:
    """Stochastic and nearest, forward and backward, around a layer with weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            Quantize(halp.Precision("fp8_e4m3", "stoc"), halp.Precision("fp8_e5m2", "stoc")),
            Quantize("mxfp4", clip_gradient=True),
        )


@pytest.mark.slow
def test_a_compiled_module_is_the_eager_one_call_after_call():
    torch._dynamo.reset()
    eager, plain = network(), network()
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    drawn = []
    for _ in range(3):
        results = []
        for module in (eager, compiled):
            x = X.clone().requires_grad_()
            y = module(x)
            y.backward(UPSTREAM)
            results.append((y.detach(), x.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        drawn.append(results[0])
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][1], drawn[1][1])
    torch._dynamo.reset()


def test_a_network_of_quantizers_trains():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(33, 16), Quantize("fp8_e4m3", "fp8_e5m2"), nn.ReLU(), nn.Linear(16, 1)
        )
        target = X[:, :1] - X[:, 1:2]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(200):
            optimizer.zero_grad()
            loss = (model(X) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
