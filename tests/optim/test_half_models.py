"""Models whose own dtype is float16 or bfloat16: rounded once in float32, onto the grid."""

import pytest
import torch
from torch import nn

import halp
from halp import emulate, quantize
from halp.optim import LPSGD, LPSVRG, SGD, SVRG, BitCenterSGD, BitCenterSVRG
from halp.precision import Precision, RoundedCopies, Rounder

HALVES = [torch.bfloat16, torch.float16]
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
#: Formats that each dtype holds.
HELD = [
    (torch.bfloat16, "bf16"),
    (torch.bfloat16, "fp8_e4m3"),
    (torch.bfloat16, "mxfp4"),
    (torch.bfloat16, "fixed8"),
    (torch.float16, "fp16"),
    (torch.float16, "fp8_e5m2"),
    (torch.float16, "mxfp8_e4m3"),
]
#: And formats with more digits, or more range.
NOT_HELD = [
    (torch.bfloat16, "fp16"),
    (torch.bfloat16, "fp32"),
    (torch.bfloat16, "fixed16"),
    (torch.float16, "bf16"),
    (torch.float16, "tf32"),
    (torch.float16, "fixed16"),
]
ROUNDINGS = ["near", "stoc", "up", "void"]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Run:
    """A small model of a dtype, with all that an update may read."""

    def __init__(self, solver, dtype, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)
        self.x = randn(6, 4).to(dtype)
        if issubclass(solver, SVRG | LPSVRG):
            options["T"] = 10
        self.optimizer = solver(
            self.model.parameters(),
            lr=0.125,
            momentum=0.5,
            weight_decay=0.125,
            **options,
        )

    def closure(self, x=None):
        self.optimizer.zero_grad()
        loss = self.model(self.x if x is None else x).square().mean()
        loss.backward()
        return loss

    def train(self, steps=3):
        self.optimizer.snapshot([(self.x,)], self.closure)
        for _ in range(steps):
            self.optimizer.step(self.closure)
        return self

    def kept(self):
        """Return everything that the solver keeps of every parameter, weights included."""
        for p in self.model.parameters():
            yield p
            for value in self.optimizer.state[p].values():
                if isinstance(value, torch.Tensor):
                    yield value


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype, format", HELD)
@pytest.mark.parametrize("solver", [LPSGD, LPSVRG])
def test_all_that_a_solver_keeps_lies_on_the_grid_in_the_models_dtype(
    solver, dtype, format, rounding
):
    scale = 2.0**-5 if format == "fixed8" else None
    run = Run(solver, dtype, format=format, rounding=rounding, scale=scale).train()
    for x in run.kept():
        assert x.dtype == dtype
        assert x.isfinite().all()
        if rounding != "void":
            assert torch.equal(quantize(x, format, scale=scale), x)
    assert any(x.count_nonzero() for x in run.kept())


@pytest.mark.parametrize("dtype, format", HELD)
@pytest.mark.parametrize("scale", [None, "auto"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_update_computes_in_float32_and_rounds_once(dtype, format, scale, decay):
    """A twin in float32, with the same gradients, goes through the same numbers."""
    weights, gradients = randn(40).to(dtype), [randn(40, seed=s).to(dtype) for s in (1, 2, 3)]
    results = []
    for wide in (False, True):
        p = nn.Parameter(weights.float() if wide else weights.clone())
        options = {"momentum": 0.9, "weight_decay": decay, "nesterov": True}
        optimizer = LPSGD([p], lr=0.3, format=format, scale=scale, **options)
        for g in gradients:
            p.grad = g.float() if wide else g.clone()
            optimizer.step()
        results.append((p.float(), optimizer.state[p]["momentum_buffer"].float()))
    for half, wide in zip(*results, strict=True):
        assert torch.equal(half, wide)


@halves
def test_the_three_terms_of_a_gradient_are_added_in_float32(dtype):
    p = nn.Parameter(torch.zeros(100, dtype=dtype))
    optimizer = LPSVRG([p], lr=0.1, format="fp8_e4m3", T=3)
    terms = [quantize(randn(100, seed=s), "fp8_e4m3").to(dtype) for s in (1, 2, 3)]
    p.grad, at_snapshot, optimizer.state[p]["full_gradient"] = terms
    optimizer._gradients_at_snapshot = {p: at_snapshot}
    first, second, third = (term.double() for term in terms)
    gradient = optimizer._gradient(p, optimizer.param_groups[0])
    assert torch.equal(gradient.double(), first - second + third)


@pytest.mark.parametrize("dtype, format", NOT_HELD)
@pytest.mark.parametrize("solver", [LPSGD, LPSVRG])
def test_a_dtype_that_does_not_hold_the_format_is_refused(solver, dtype, format):
    message = f"parameter 0 is {dtype}, which does not hold every value of {format}; .*float32"
    with pytest.raises(TypeError, match=message):
        Run(solver, dtype, format=format)
    Run(solver, dtype, format=format, rounding="void").train()


def test_a_scale_counts_in_what_a_dtype_holds():
    held = lambda format, scale: Precision(format, scale=scale).is_held_by(torch.float16)  # noqa: E731
    assert held("fp8_e4m3", 2.0**4)
    assert not held("fp8_e4m3", 2.0**8)
    assert not held("fp8_e4m3", 2.0**-20)
    assert held("bf16", "auto")
    assert not held("bf16", None)
    assert not held("fp32", "auto")
    assert Precision("fp32").is_held_by(torch.float32)


@halves
@pytest.mark.parametrize("solver", [SGD, SVRG])
def test_full_precision_solvers_train_half_models_as_pytorch_does(solver, dtype):
    run = Run(solver, dtype).train()
    if solver is SGD:
        twin = Run(SGD, dtype)
        theirs = torch.optim.SGD(
            twin.model.parameters(), lr=0.125, momentum=0.5, weight_decay=0.125
        )
        for _ in range(3):
            twin.closure()
            theirs.step()
        for ours, other in zip(run.model.parameters(), twin.model.parameters(), strict=True):
            assert torch.equal(ours, other)
    for x in run.kept():
        assert x.dtype == dtype
        assert x.isfinite().all()


@halves
@pytest.mark.parametrize("solver", [BitCenterSGD, BitCenterSVRG])
def test_bit_centered_solvers_refuse_half_models(solver, dtype):
    model = nn.Linear(4, 3).to(dtype)
    with pytest.raises(TypeError, match="bit centering takes torch.float32 or torch.float64"):
        halp.bit_center(model)
    with pytest.raises(TypeError, match="halp.bit_center"):
        solver(model.parameters(), lr=0.1, T=3).snapshot([], lambda: None)


@halves
def test_momentum_from_elsewhere_is_rounded_once(dtype):
    """Through the dtype first, 1 + 2⁻⁴ + 2⁻¹³ would become a tie, and go to even."""
    p = nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer = LPSGD([p], lr=0.1, momentum=0.9, format="fp8_e4m3")
    optimizer.load_momentum({p: torch.tensor([1 + 2.0**-4 + 2.0**-13])})
    buffer = optimizer.state[p]["momentum_buffer"]
    assert buffer.dtype == dtype
    assert buffer.item() == 1.125


@halves
def test_the_full_gradient_of_a_half_model_is_rounded_once(dtype):
    p = nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer = LPSVRG([p], lr=0.1, format="fp8_e4m3", T=3)
    stored = optimizer._stored(p, torch.tensor([1 + 2.0**-4 + 2.0**-13], dtype=torch.float64))
    assert stored.dtype == dtype
    assert stored.item() == 1.125


@halves
@pytest.mark.parametrize("solver", [LPSGD, LPSVRG])
def test_a_resumed_run_of_a_half_model_goes_on_bit_for_bit(solver, dtype):
    runs = [Run(solver, dtype, format="fp8_e5m2", rounding="stoc") for _ in range(2)]
    runs[0].train(2)
    runs[1].model.load_state_dict(runs[0].model.state_dict())
    runs[1].optimizer.load_state_dict(runs[0].optimizer.state_dict())
    for run in runs:
        run.optimizer.step(run.closure)
    for first, second in zip(runs[0].kept(), runs[1].kept(), strict=True):
        assert torch.equal(first, second)


# --- below the solvers


@halves
@pytest.mark.parametrize("rounding", ["near", "stoc", "down"])
@pytest.mark.parametrize("scale", [None, "auto", 0.25])
@pytest.mark.parametrize("format", ["fp8_e4m3", "bf16", "fp16", "mxfp4", "fixed8", "e8m1"])
def test_a_rounder_takes_half_precision_as_quantize_does(dtype, rounding, scale, format):
    x = (randn(100) * 100).to(dtype)
    precision = Precision(format, rounding, scale)
    result = Rounder(precision)(x)
    assert result.dtype == dtype
    if rounding != "stoc":
        assert torch.equal(result, quantize(x, format, rounding, scale=scale))
        copies = RoundedCopies(Rounder(precision))
        assert torch.equal(copies.rounded(x, dtype), result)
    near = precision.nearest(x)
    assert torch.equal(near, quantize(x, format, scale=scale))
    assert torch.equal(precision.in_range(x), precision.in_range(x.float()))


def test_results_end_with_what_dtype_and_format_both_hold():
    """65504 rounds to 65536 in bf16, which float16 does not hold; 65504 is none of bfloat16."""
    largest = torch.tensor([65504.0, -65504.0], dtype=torch.float16)
    huge = torch.tensor([1e30, -1e30], dtype=torch.bfloat16)
    with emulate("bf16"):
        assert (largest * 1).tolist() == [65280.0, -65280.0]
    with emulate("fp16"):
        assert (huge * 1).tolist() == [65280.0, -65280.0]
    assert halp.Quantize("bf16")(largest).tolist() == [65280.0, -65280.0]
    assert quantize(largest, "bf16").tolist() == [65280.0, -65280.0]


@halves
def test_stochastic_rounding_of_half_precision_is_unbiased(dtype):
    x = torch.full((20000,), 1.03125, dtype=dtype)  # a quarter of a step of fp8_e4m3
    mean = Rounder(Precision("fp8_e4m3", "stoc"))(x).double().mean().item()
    spread = 0.125 * (0.25 * 0.75 / 20000) ** 0.5
    assert abs(mean - 1.03125) < 5 * spread


@halves
@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp4"])
def test_a_half_model_runs_under_emulate(dtype, format):
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)
    with emulate(format, "stoc"):
        model(randn(6, 4).to(dtype)).square().mean().backward()
    for p in model.parameters():
        assert p.grad.dtype == dtype
        assert torch.equal(quantize(p.grad, format), p.grad)


@halves
@pytest.mark.parametrize("solver", [LPSGD, LPSVRG])
def test_autocast_in_the_closure_of_a_plain_model(dtype, solver):
    run = Run(solver, torch.float32, format="fp8_e4m3")

    def closure(x=run.x):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = run.model(x).float().square().mean()
        loss.backward()
        return loss

    run.optimizer.snapshot([(run.x,)], closure)
    run.optimizer.step(closure)
    for x in run.kept():
        assert x.dtype == torch.float32
        assert torch.equal(quantize(x, "fp8_e4m3"), x)
