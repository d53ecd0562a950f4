"""The delta gradient is right to the format's roundoff, however small the delta (rows 2, 3, 4).

z is s·N(0, 1) on the format's grid. The truth is PyTorch's autograd on the plain model in float64,
at exactly the bit-centered model's w̃ and w̃ + z.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halp
from tests.bitcenter.cached import record
from tests.bitcenter.replay import (
    Decision,
    Replay,
    at_decision,
    decide,
    distance_from_kink,
    moved_gradients,
    recorded,
)
from tests.cases import (
    BATCH_NORM_NET,
    CASES,
    DROPOUT,
    LENET,
    LOGISTIC,
    NETS,
    RELU,
    RESNET,
    SMOOTH,
    TAGGER,
    VARIATIONS,
    Case,
    by_name,
)

SIZES = [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8]
#: What the fast tests try: nothing new happens in between.
ENDS = [1e-2, 1e-8]
#: Float64 arithmetic, nothing rounded.
EXACT = {"rounding": "void"}
#: Errors by size of the deltas and seed.
Errors = dict[tuple[float, int], float]
#: Row 4's models.
DECIDING = [*RELU, LENET, BATCH_NORM_NET, RESNET]


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
    (batch,) = case.batches(seed=seed, dtype=dtype)
    context = next(model.parameters()).context
    if context.cache is not None:
        torch.manual_seed(seed)
        record(model, [batch], lambda x, y: differentiate(case.loss_of(model, x, y)))
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        z = size * torch.randn(p.shape, generator=generator, dtype=dtype)
        if context.precision.rounding != "void":
            z = halp.quantize(z, context.precision.format, scale="auto")
        p.delta.copy_(z)
    return Centered(model, twin, batch)


def differentiate(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


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


OFFSETS = pytest.mark.parametrize("offsets", ["on-site", "cached"])


def errors_of(case: Case, sizes: list[float], seeds: Iterable[int], **precision) -> Errors:
    """Return the delta gradient's error by size and seed."""
    errors = {}
    for size, seed in itertools.product(sizes, seeds):
        centered = center(case, size, seed, **precision)
        run(case, centered)
        errors[size, seed] = delta_error(case, centered)
    return errors


def assert_within(low: float, high: float, errors: Errors) -> None:
    """Check each of many; say of which sizes and seeds the wrong ones are."""
    wrong = {key: error for key, error in errors.items() if not low <= error <= high}
    assert errors and not wrong, f"of (size, seed), not within {low} and {high}: {wrong}"


# Row 3: smooth models. An error below 1e-5 would say that nothing was rounded.


@OFFSETS
@by_name([*SMOOTH, TAGGER, *VARIATIONS])
def test_delta_gradient_error_does_not_grow_as_delta_shrinks(case, offsets):
    assert_within(1e-5, 2e-3, errors_of(case, ENDS, [0], format="fp16", offsets=offsets))


@pytest.mark.slow
@OFFSETS
@by_name([*SMOOTH, TAGGER, *VARIATIONS])
def test_so_it_is_at_every_size(case, offsets):
    assert_within(1e-5, 2e-3, errors_of(case, SIZES, range(1, 4), format="fp16", offsets=offsets))


@OFFSETS
@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("format", ["fp16", "bf16", "fp8_e4m3"])
def test_delta_gradient_error_is_the_unit_roundoff_of_the_format(format, rounding, offsets):
    precision = {"format": format, "rounding": rounding, "offsets": offsets}
    unit = halp.formats.get(format).unit_roundoff
    for case in LOGISTIC:
        assert_within(0.2 * unit, 4 * unit, errors_of(case, [1e-2, 1e-5, 1e-8], [0], **precision))


class SameMasks(nn.Module):
    """Dropout in float64 with the mask that float32 dropout draws."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(torch.ones(x.shape), self.p).to(x.dtype)


@by_name(DROPOUT)
def test_offset_and_delta_see_one_dropout_mask(case):
    errors = {}
    for size, seed in itertools.product(ENDS, range(3)):
        centered = center(case, size, seed, format="fp16")
        replace_modules(centered.twin, nn.Dropout, lambda dropout: SameMasks(dropout.p))
        run(case, centered, seed)
        errors[size, seed] = delta_error(case, centered, seed)
    assert_within(1e-5, 2e-3, errors)


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


@by_name(CASES)
def test_without_rounding_offset_plus_delta_is_the_gradient_at_the_full_value(case):
    """Whether offsets are computed on site or cached."""
    for size in (1e-1, 1e-8):
        centered, cached = (
            center(case, size, 0, torch.float64, offsets=offsets, **EXACT)
            for offsets in ("on-site", "cached")
        )
        for each in (centered, cached):
            run(case, each)
        before, after = true_gradients(case, centered)
        for p, at_offset, at_value in zip(centered.model.parameters(), before, after, strict=True):
            assert relative_error(p.grad.offset, at_offset) <= 1e-12
            assert relative_error(p.grad.offset + p.grad.delta, at_value) <= 1e-12
        for kept, computed in zip(cached.deltas, centered.deltas, strict=True):
            assert relative_error(kept, computed) <= 1e-12


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


@by_name([*SMOOTH, *RELU, *VARIATIONS, *NETS])
def test_without_rounding_the_delta_gradient_of_a_tiny_delta_is_the_hessian_times_it(case):
    for size in (1e-13, 1e-30):
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


def replace_modules(model: nn.Module, kind: type, new: Callable[[nn.Module], nn.Module]) -> None:
    """Replace the children of a kind."""
    for name, child in list(model.named_children()):
        if isinstance(child, kind):
            setattr(model, name, new(child))


# Row 4: models that decide.


def run_recorded(case: Case, centered: Centered) -> list[Decision]:
    """Do a pass on the bit-centered model and return what it decided."""
    with recorded() as decisions:
        run(case, centered)
    assert decisions
    return decisions


class Replayed(NamedTuple):
    """A run of the float64 twin with the decisions of the bit-centered run."""

    gradients: list[Tensor]
    #: The inputs of each ReLU and max-pool.
    seen: list[Tensor]


def replay(case: Case, centered: Centered, decisions: list[Decision]) -> tuple[Replayed, Replayed]:
    """Run the twin at w̃ with what the offset decided, and at w̃ + z with what the full value did."""
    replayed = []
    for at_full_value in (False, True):
        place_twin(centered, at_full_value)
        decided = [d.after if at_full_value else d.before for d in decisions]
        with Replay(decided) as mode:
            replayed.append(Replayed(gradients_of_twin(case, centered), mode.seen))
    return replayed[0], replayed[1]


@OFFSETS
@by_name([*RELU, BATCH_NORM_NET, RESNET])
def test_delta_gradient_is_right_for_the_decisions_that_were_taken(case, offsets):
    check_decided(case, ENDS, range(2), offsets)


@pytest.mark.slow
@OFFSETS
@by_name([*RELU, BATCH_NORM_NET])
def test_so_it_is_for_decisions_at_every_size(case, offsets):
    check_decided(case, SIZES, range(2, 5), offsets)


def check_decided(case: Case, sizes: list[float], seeds: Iterable[int], offsets: str) -> None:
    changed, errors = dict.fromkeys(sizes, 0), {}
    for size, seed in itertools.product(sizes, seeds):
        centered = center(case, size, seed, format="fp16", offsets=offsets)
        decisions = run_recorded(case, centered)
        before, after = replay(case, centered, decisions)
        true = [b - a for a, b in zip(before.gradients, after.gradients, strict=True)]
        errors[size, seed] = max(map(relative_error, centered.deltas, true))
        changed[size] += sum(d.changed for d in decisions)
    assert_within(1e-5, 3e-3 if case is RESNET else 2e-3, errors)
    unchanged = [size for size, count in changed.items() if size >= 1e-4 and not count]
    assert not unchanged, f"no decision changed between offset and full value at {unchanged}"


@OFFSETS
def test_delta_gradient_is_right_for_the_winners_that_were_taken(offsets):
    """But for the roundoff of gradients that move to another winner.

    Where one arrives, it is rounded together with a delta that may be much smaller; in a sum over
    the image, the gradient of a bias, it cancels with where it came from, and its roundoff stays.
    """
    check_winners(ENDS, range(2), offsets)


@pytest.mark.slow
@OFFSETS
def test_so_it_is_for_winners_at_every_size(offsets):
    check_winners(SIZES, range(2, 11), offsets)


def check_winners(sizes: list[float], seeds: Iterable[int], offsets: str) -> None:
    for size, seed in itertools.product(sizes, seeds):
        centered = center(LENET, size, seed, format="fp16", offsets=offsets)
        with moved_gradients() as moved:
            decisions = run_recorded(LENET, centered)
        before, after = replay(LENET, centered, decisions)
        roundoff = halp.formats.get("fp16").unit_roundoff * sum(g.abs().sum() for g in moved)
        for computed, a, b in zip(centered.deltas, before.gradients, after.gradients, strict=True):
            error = (computed.double() - (b - a)).norm()
            assert error <= 2e-3 * (b - a).norm() + roundoff, f"size {size}, seed {seed}"


@by_name(DECIDING)
def test_decisions_are_those_of_the_unrounded_offset_plus_the_delta(case):
    """And their deltas are right, so that they differ from float64's within the row's error."""
    check_what_decides(case, ENDS, [0])


@pytest.mark.slow
@by_name([*RELU, LENET, BATCH_NORM_NET])
def test_so_it_is_for_what_decides_at_every_size(case):
    check_what_decides(case, SIZES, range(1, 4))


def check_what_decides(case: Case, sizes: list[float], seeds: Iterable[int]) -> None:
    for size, seed in itertools.product(sizes, seeds):
        centered = center(case, size, seed, format="fp16")
        decisions = run_recorded(case, centered)
        at_offset, at_value = replay(case, centered, decisions)
        for decided, u, full in zip(decisions, at_offset.seen, at_value.seen, strict=True):
            bound = 3e-3 if case is RESNET else 2e-3
            assert relative_error(decided.delta, full - u) <= bound, f"size {size}, seed {seed}"
            assert_decided(decided, decided.offset.double(), decided.delta.double())
            if case in RELU:
                assert_decided(decided, u, full - u)


def assert_decided(decided: Decision, u: Tensor, e: Tensor) -> None:
    """Check that float64 decides alike, but where row 4b lets it differ."""
    for choice, x, size in ((decided.after, u + e, e.abs()), (decided.before, u, 0 * e)):
        margin = distance_from_kink(choice, x)
        room = 2**-10 * at_decision(choice, size) + 1e-6 * u.abs().max()
        assert not ((decide(choice, x) != choice) & (margin > room)).any()


@OFFSETS
@by_name([LENET, BATCH_NORM_NET])
def test_against_float64s_own_decisions_few_make_a_difference(case, offsets):
    """One decision more or less moves the error, and is another processor's: hence the median."""
    check_against_float64(case, ENDS, offsets)


@pytest.mark.slow
@OFFSETS
@by_name([LENET, BATCH_NORM_NET])
def test_so_it_is_against_float64_at_every_size(case, offsets):
    check_against_float64(case, SIZES, offsets)


def check_against_float64(case: Case, sizes: list[float], offsets: str) -> None:
    for size in sizes:
        errors = errors_of(case, [size], range(11), format="fp16", offsets=offsets)
        assert sorted(errors.values())[5] <= (3e-2 if size >= 1e-3 else 4e-3), f"size {size}"
