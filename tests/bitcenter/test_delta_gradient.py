"""The delta gradient is right to the format's roundoff, however small the delta (rows 2, 3, 4).

z is s·N(0, 1) on the format's grid. The truth is PyTorch's autograd on the plain model in float64,
at exactly the bit-centered model's w̃ and w̃ + z.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halp
from tests.cases import CASES, DROPOUT, LOGISTIC, RELU, SMOOTH, VARIATIONS, Case

SIZES = [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8]
SEEDS = range(3)
#: Float64 arithmetic, nothing rounded.
EXACT = {"rounding": "void"}


def by_name(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


def relative_error(computed: Tensor, true: Tensor) -> float:
    """Return ‖computed − true‖ / ‖true‖ in float64."""
    assert true.norm() > 0
    return ((computed.double() - true).norm() / true.norm()).item()


class Centered(NamedTuple):
    """A bit-centered model after a backward pass, its plain float64 twin, and the batch."""

    model: nn.Module
    twin: nn.Module
    batch: tuple[Tensor, Tensor]

    @property
    def deltas(self) -> list[Tensor]:
        return [p.grad.delta for p in self.model.parameters()]


def center(case: Case, size: float, seed: int, dtype=torch.float32, **precision) -> Centered:
    """Return the case's model bit-centered, with deltas of the given size, and its twin."""
    model = case.model(seed, dtype)
    twin = copy.deepcopy(model).double()
    halp.bit_center(model, **precision)
    context = next(model.parameters()).context
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        z = size * torch.randn(p.shape, generator=generator, dtype=dtype)
        if context.precision.rounding != "void":
            z = halp.quantize(z, context.precision.format, scale="auto")
        p.delta.copy_(z)
    (batch,) = case.batches(seed=seed, dtype=dtype)
    return Centered(model, twin, batch)


def run(case: Case, centered: Centered, seed: int = 0) -> None:
    """Do one forward and backward pass on the bit-centered model."""
    torch.manual_seed(seed)
    case.loss_of(centered.model, *centered.batch).backward()


def place_twin(centered: Centered, at_full_value: bool) -> None:
    """Put the twin at w̃ + z, or at w̃."""
    with torch.no_grad():
        for plain, p in zip(centered.twin.parameters(), centered.model.parameters(), strict=True):
            plain.copy_(p.offset.double() + at_full_value * p.delta.double())


def gradients_of_twin(case: Case, centered: Centered, seed: int = 0) -> list[Tensor]:
    x, y = (t.double() if t.is_floating_point() else t for t in centered.batch)
    torch.manual_seed(seed)
    loss = case.loss_of(centered.twin, x, y)
    return list(torch.autograd.grad(loss, list(centered.twin.parameters())))


def true_gradients(case: Case, centered: Centered, seed: int = 0) -> tuple[list[Tensor], ...]:
    """Return ∇f(w̃) and ∇f(w̃ + z) in float64."""
    place_twin(centered, at_full_value=False)
    before = gradients_of_twin(case, centered, seed)
    place_twin(centered, at_full_value=True)
    return before, gradients_of_twin(case, centered, seed)


def delta_error(case: Case, centered: Centered, seed: int = 0) -> float:
    """Return the largest relative error over parameters of the delta gradient."""
    before, after = true_gradients(case, centered, seed)
    true = [b - a for a, b in zip(before, after, strict=True)]
    return max(map(relative_error, centered.deltas, true))


# Row 3: smooth models.


@pytest.mark.parametrize("size", SIZES)
@by_name(SMOOTH + VARIATIONS)
def test_delta_gradient_error_does_not_grow_as_delta_shrinks(case, size):
    for seed in SEEDS:
        centered = center(case, size, seed, format="fp16")
        run(case, centered)
        error = delta_error(case, centered)
        assert error <= 2e-3
        assert error >= 1e-5, "nothing was rounded"


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("format", ["fp16", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("size", [1e-2, 1e-5, 1e-8])
def test_delta_gradient_error_is_the_unit_roundoff_of_the_format(format, rounding, size):
    for case in LOGISTIC:
        centered = center(case, size, 0, format=format, rounding=rounding)
        run(case, centered)
        roundoffs = delta_error(case, centered) / halp.formats.get(format).unit_roundoff
        assert 0.2 < roundoffs < 4


class SameMasks(nn.Module):
    """Dropout in float64 with the mask that float32 dropout draws."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(torch.ones(x.shape), self.p).to(x.dtype)


@pytest.mark.parametrize("size", SIZES)
@by_name(DROPOUT)
def test_offset_and_delta_see_one_dropout_mask(case, size):
    for seed in SEEDS:
        centered = center(case, size, seed, format="fp16")
        replace_modules(centered.twin, nn.Dropout, lambda dropout: SameMasks(dropout.p))
        run(case, centered, seed)
        assert 1e-5 <= delta_error(case, centered, seed) <= 2e-3


@pytest.mark.parametrize("offset_dtype", [torch.float32, torch.float64])
def test_delta_gradient_has_the_models_dtype_whatever_that_of_offsets(offset_dtype):
    case = SMOOTH[2]
    centered = center(case, 1e-4, 0, format="fp16", offset_dtype=offset_dtype)
    run(case, centered)
    for p in centered.model.parameters():
        assert p.grad.delta.dtype == torch.float32
        assert p.grad.offset.dtype == offset_dtype
    assert delta_error(case, centered) <= 2e-3


# Row 2: nothing rounded.


@pytest.mark.parametrize("size", [1e-1, 1e-2, 1e-4, 1e-8])
@by_name(CASES)
def test_without_rounding_offset_plus_delta_is_the_gradient_at_the_full_value(case, size):
    centered = center(case, size, 0, torch.float64, **EXACT)
    run(case, centered)
    before, after = true_gradients(case, centered)
    for p, at_offset, at_value in zip(centered.model.parameters(), before, after, strict=True):
        assert relative_error(p.grad.offset, at_offset) <= 1e-12
        assert relative_error(p.grad.offset + p.grad.delta, at_value) <= 1e-12


def hessian_products(case: Case, centered: Centered) -> list[Tensor]:
    """Return ∇²f(w̃)·z, by differentiating twice: what the delta gradient is for small z."""
    place_twin(centered, at_full_value=False)
    parameters = list(centered.twin.parameters())
    x, y = (t.double() if t.is_floating_point() else t for t in centered.batch)
    loss = case.loss_of(centered.twin, x, y)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    directions = [p.delta.double() for p in centered.model.parameters()]
    product = sum((g * z).sum() for g, z in zip(gradients, directions, strict=True))
    return list(torch.autograd.grad(product, parameters))


@pytest.mark.parametrize("size", [1e-13, 1e-20, 1e-30])
@by_name(SMOOTH + RELU + VARIATIONS)
def test_without_rounding_the_delta_gradient_of_a_tiny_delta_is_the_hessian_times_it(case, size):
    centered = center(case, size, 0, torch.float64, **EXACT)
    run(case, centered)
    for computed, true in zip(centered.deltas, hessian_products(case, centered), strict=True):
        assert relative_error(computed, true) <= 1e-9


@by_name(SMOOTH)
def test_delta_gradient_error_is_the_same_for_deltas_that_float64_cannot_add(case):
    centered = center(case, 1e-20, 0, format="fp16")
    run(case, centered)
    errors = map(relative_error, centered.deltas, hessian_products(case, centered))
    assert 1e-5 <= max(errors) <= 2e-3


# Row 4: models with ReLU.


class Decisions(NamedTuple):
    """What one ReLU of a bit-centered pass saw and decided."""

    offset: Tensor
    delta: Tensor
    after: Tensor

    @property
    def before(self) -> Tensor:
        return self.offset > 0


def replace_modules(model: nn.Module, kind: type, new: Callable[[nn.Module], nn.Module]) -> list:
    """Replace the children of a kind; return the new ones."""
    made = []
    for name, child in list(model.named_children()):
        if isinstance(child, kind):
            setattr(model, name, new(child))
            made.append(getattr(model, name))
    return made


class ReplayedReLU(nn.Module):
    """A ReLU with a given mask, which notes its input."""

    mask: Tensor
    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        return torch.where(self.mask, x, 0)


class Replay(NamedTuple):
    """A run of the float64 twin with the masks of the bit-centered run."""

    gradients: list[Tensor]
    #: The inputs of each ReLU.
    seen: list[Tensor]


def run_recorded(case: Case, centered: Centered) -> list[Decisions]:
    """Do a pass on the bit-centered model and return what each of its ReLUs decided."""
    decisions: list[Decisions] = []

    def record(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        (x,) = inputs
        decisions.append(Decisions(x.offset.clone(), x.delta.clone(), output.decision.clone()))

    for module in centered.model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(record)
    run(case, centered)
    assert decisions
    return decisions


def replay(case: Case, centered: Centered, decisions: list[Decisions]) -> tuple[Replay, Replay]:
    """Run the twin at w̃ with the masks of the offset, and at w̃ + z with those decided."""
    relus = replace_modules(centered.twin, nn.ReLU, lambda _: ReplayedReLU())
    replays = []
    for at_full_value in (False, True):
        for relu, decided in zip(relus, decisions, strict=True):
            relu.mask = decided.after if at_full_value else decided.before
        place_twin(centered, at_full_value)
        gradients = gradients_of_twin(case, centered)
        replays.append(Replay(gradients, [relu.seen for relu in relus]))
    return replays[0], replays[1]


@pytest.mark.parametrize("size", SIZES)
@by_name(RELU)
def test_delta_gradient_is_right_for_the_decisions_that_were_taken(case, size):
    changed = 0
    for seed in SEEDS:
        centered = center(case, size, seed, format="fp16")
        decisions = run_recorded(case, centered)
        before, after = replay(case, centered, decisions)
        true = [b - a for a, b in zip(before.gradients, after.gradients, strict=True)]
        assert 1e-5 <= max(map(relative_error, centered.deltas, true)) <= 2e-3
        changed += sum(int((d.before != d.after).sum()) for d in decisions)
    assert changed or size < 1e-4, "no decision changed between offset and full value"


def is_near_the_kink(offset: Tensor, full: Tensor) -> Tensor:
    """Return where |u + e| ≤ 2⁻¹⁰|e| + 1e-6·max|u|, in float64."""
    return full.abs() <= 2**-10 * (full - offset).abs() + 1e-6 * offset.abs().max()


@pytest.mark.parametrize("size", SIZES)
def test_decisions_differ_from_float64s_only_next_to_the_kink(size):
    case = RELU[0]
    for seed in range(8):
        centered = center(case, size, seed, format="fp16")
        decisions = run_recorded(case, centered)
        at_offset, at_value = replay(case, centered, decisions)
        for decided, u, full in zip(decisions, at_offset.seen, at_value.seen, strict=True):
            differs = (full > 0) != decided.after
            assert not (differs & ~is_near_the_kink(u, full)).any()
            assert torch.equal(
                decided.before | is_near_the_kink(u, u), (u > 0) | is_near_the_kink(u, u)
            )


@pytest.mark.parametrize("size", SIZES)
def test_decisions_are_those_of_the_unrounded_offset_plus_the_delta(size):
    for seed in range(8):
        for decided in run_recorded(RELU[0], center(RELU[0], size, seed, format="fp16")):
            full = decided.offset.double() + decided.delta.double()
            differs = (full > 0) != decided.after
            assert not (differs & (full.abs() > 1e-7 * decided.offset.abs())).any()
