"""A precision is checked when it is made; its roundings are a sequence that can be repeated."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from halp import formats, quantize
from halp.precision import Precision, RoundedCopies, Rounder, as_wide


@pytest.fixture
def x():
    return torch.randn(1000, generator=torch.Generator().manual_seed(0))


def copies(format="fp16", rounding="near") -> RoundedCopies:
    return RoundedCopies(Rounder(Precision(format, rounding)))


def test_a_name_becomes_its_format():
    assert Precision("fp16") == Precision(formats.get("fp16"))
    assert Precision("fp16").format is formats.get("fp16")


def test_a_precision_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Precision("fp16").rounding = "stoc"


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"format": "fp17"}, ValueError, "unknown format 'fp17'; known formats: "),
        ({"format": 16}, TypeError, "a format is a name, a FloatFormat, .* not 16"),
        ({"rounding": "up!"}, ValueError, "unknown rounding 'up!'; known: near"),
        ({"overflow": "wrap"}, ValueError, "unknown overflow 'wrap'; known: saturate"),
        ({"scale": "huge"}, ValueError, "scale must be None, .* not 'huge'"),
        ({"scale": 0.0}, ValueError, "scale must be None, .* not 0.0"),
        ({"seed": 0.5}, TypeError, "seed must be an int, not 0.5"),
        ({"seed": None}, TypeError, "seed must be an int, not None"),
    ],
)
def test_a_wrong_precision_is_refused_when_it_is_made(arguments, error, message):
    with pytest.raises(error, match=message):
        Precision(**{"format": "fp16", **arguments})


@pytest.mark.parametrize("overflow", ["saturate", "inf"])
@pytest.mark.parametrize("scale", [None, 0.25, "auto"])
@pytest.mark.parametrize("format", formats.names())
def test_a_rounder_rounds_as_quantize_does(x, format, scale, overflow):
    rounder = Rounder(Precision(format, "near", scale, overflow))
    for data in (x * 1e3, x.double() * 1e3):
        expected = quantize(data, format, scale=scale, overflow=overflow)
        torch.testing.assert_close(rounder(data), expected, rtol=0, atol=0, equal_nan=True)
    assert rounder.position == 0


def test_void_returns_the_tensor_itself(x):
    assert Rounder(Precision("fp8_e4m3", "void"))(x) is x


def test_every_stochastic_rounding_has_random_bits_of_its_own(x):
    rounder = Rounder(Precision("fp16", "stoc"))
    results = [rounder(x) for _ in range(3)]
    assert rounder.position == 3
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])


def test_copies_of_the_same_values_are_alike_within_a_step_however_they_lie(x):
    rounder = Rounder(Precision("fp16", "stoc"))
    rounder.new_step()
    weights = x.view(50, 20)
    copy = rounder.copy(weights)
    assert torch.equal(rounder.copy(weights.clone()), copy)
    assert torch.equal(rounder.copy(x), copy.view(-1))
    assert torch.equal(rounder.copy(weights.t()).t(), copy)
    assert torch.equal(
        rounder.copy(x.view(5, 10, 20).permute(2, 0, 1)).permute(1, 2, 0).reshape(50, 20), copy
    )
    assert rounder.position == 1  # the step's own


def test_copies_of_other_values_and_in_other_steps_draw_other_bits(x):
    rounder = Rounder(Precision("fixed8", "stoc", scale=1.0))
    halves = torch.full((1000,), 0.5)
    seen = []
    for values in (halves, halves + 2.0**-20):
        for _ in range(2):
            rounder.new_step()
            seen.append(rounder.copy(values))
    for i, a in enumerate(seen):
        assert abs(a.mean().item() - 0.5) < 5 * 0.5 / 1000**0.5
        for b in seen[:i]:
            assert abs((a == b).double().mean().item() - 0.5) < 5 * 0.5 / 1000**0.5


def test_setting_the_position_back_repeats_the_roundings_bit_for_bit(x):
    rounder = Rounder(Precision("fp16", "stoc", seed=7))
    results = [rounder(x) for _ in range(4)]
    rounder.position = 2
    assert torch.equal(rounder(x), results[2])
    assert torch.equal(rounder(x), results[3])


def test_the_seed_decides_the_roundings(x):
    first, again, other = (Rounder(Precision("fp16", "stoc", seed=seed)) for seed in (1, 1, 2))
    result = first(x)
    assert torch.equal(again(x), result)
    assert not torch.equal(other(x), result)


def test_compiling_stochastic_steps_is_refused_rather_than_repeating_their_bits(x):
    torch._dynamo.reset()
    rounder = Rounder(Precision("fp16", "stoc"))
    with pytest.raises(Exception, match="cannot be compiled yet"):
        torch.compile(lambda x: rounder(x) * 2, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()


def test_wide_is_float32_unless_it_is_float64():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert as_wide(torch.ones(2, dtype=dtype)).dtype == torch.float32
    assert as_wide(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


# --- remembered copies


def test_a_tensor_that_has_not_changed_is_rounded_once(x):
    known = copies(rounding="stoc")
    copy = known.rounded(x, x.dtype)
    assert torch.equal(known.rounded(x, x.dtype), copy)
    assert torch.equal(known.rounded(x.view(10, 100), x.dtype), copy.view(10, 100))


def test_a_matrix_and_its_transpose_are_rounded_together(x):
    weight = x.view(20, 50)
    for first, second in ((weight, weight.t()), (weight.t(), weight)):
        known = copies(rounding="stoc")
        assert torch.equal(known.rounded(first, x.dtype), known.rounded(second, x.dtype).t())


def test_a_matrix_that_is_only_read_transposed_is_rounded_once(x):
    """A linear layer reads its weight as a fresh ``weight.t()`` every time."""
    weight, known = x.view(20, 50), copies(rounding="stoc")
    first = known.rounded(weight.t(), x.dtype)
    assert torch.equal(known.rounded(weight.t(), x.dtype), first)


def test_a_changed_tensor_is_rounded_again(x):
    known = copies()
    known.rounded(x, x.dtype)
    x.mul_(3)
    assert torch.equal(known.rounded(x, x.dtype), quantize(x, "fp16"))


def test_a_new_step_draws_new_random_copies_and_keeps_those_to_nearest(x):
    stochastic, nearest = (Rounder(Precision("fp16", rounding)) for rounding in ("stoc", "near"))
    for rounder, same in ((stochastic, False), (nearest, True)):
        known = RoundedCopies(rounder)
        rounder.new_step()
        before = known.rounded(x, x.dtype)
        rounder.new_step()
        assert torch.equal(known.rounded(x, x.dtype), before) == same


def test_dtypes_are_remembered_separately(x):
    known = copies()
    assert known.rounded(x, torch.float32).dtype == torch.float32
    assert known.rounded(x, torch.float64).dtype == torch.float64
    assert known.rounded(x, torch.float32).dtype == torch.float32


def test_a_slice_at_the_start_of_a_tensor_is_another_tensor(x):
    known = copies()
    known.rounded(x, x.dtype)
    assert torch.equal(known.rounded(x[:10], x.dtype), quantize(x[:10], "fp16"))


def test_copies_are_forgotten_with_their_tensors():
    known = copies()
    for size in range(1, 1000):
        known.rounded(torch.ones(size), torch.float32)
    assert len(known._memories) <= 256


def test_memory_that_now_belongs_to_another_tensor_is_rounded_again(x):
    """``p.data = …`` frees the old memory of a parameter that lives on; a new tensor gets it."""
    memory = x.clone().numpy()
    parameter, known = torch.from_numpy(memory), copies()
    known.rounded(parameter, parameter.dtype)
    parameter.data = torch.zeros(1000)
    memory[:] = 7.0
    other = torch.from_numpy(memory)
    assert torch.equal(known.rounded(other, other.dtype), torch.full((1000,), 7.0))


def test_inference_tensors_are_rounded_too(x):
    with torch.inference_mode():
        y = x * 3
        assert torch.equal(copies().rounded(y, y.dtype), quantize(y, "fp16"))
