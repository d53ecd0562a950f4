"""What holds for any number, any format and any mode."""

import math

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halp import formats, quantize
from tests.rounding.oracles import BLOCKS, FLOATS, MODES, oracle

number = st.floats(allow_nan=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
constructed = st.builds("e{}m{}".format, st.integers(2, 11), st.integers(1, 52))
fixed = st.builds("fixed{}".format, st.integers(2, 32))
any_float = st.sampled_from(list(FLOATS)) | constructed
any_format = any_float | fixed
any_mode = st.sampled_from([*MODES, "stoc"])
scale = st.sampled_from([None, 0.25, "auto"])
random_word = st.integers(-(2**31), 2**31 - 1)
checked = settings(derandomize=True, deadline=None, max_examples=200)


def one(value: float, name: str, rounding: str = "near", word: int = 0, **kwargs) -> float:
    """Round one float64, stochastically with the given random bits."""
    if rounding == "stoc":
        kwargs["random_bits"] = torch.tensor([word], dtype=torch.int32)
    return quantize(torch.tensor([value], dtype=torch.float64), name, rounding, **kwargs).item()


def same(a: float, b: float) -> bool:
    """Equal, and zeros of the same sign."""
    return a == b and math.copysign(1, a) == math.copysign(1, b)


@checked
@given(number, any_format, any_mode, scale, random_word)
def test_rounding_twice_is_rounding_once(value, name, rounding, scale, word):
    once = one(value, name, rounding, word, scale=scale)
    if scale == "auto":  # a value that rounding moved may have a scale of its own
        assume(math.isfinite(value) and abs(once) <= abs(value))
    for again in (*MODES, "stoc"):
        assert same(one(once, name, again, ~word, scale=scale), once)


@checked
@given(number, number, any_format, any_mode, random_word, st.booleans(), st.booleans())
def test_rounding_is_monotone(a, b, name, rounding, word, saturate, subnormals):
    """Also stochastically, with the same random bits."""
    way = {"overflow": "saturate" if saturate else "inf", "subnormals": subnormals}
    a, b = sorted((a, b))
    low, high = (one(value, name, rounding, word, **way) for value in (a, b))
    assert low <= high or math.isnan(low) or math.isnan(high)  # NaN: overflow without infinity


@checked
@given(number, any_format, any_mode, random_word)
def test_results_are_values_of_the_format(value, name, rounding, word):
    result = np.array(one(value, name, rounding, word))
    assert oracle(name).info.min <= result <= oracle(name).info.max
    assert oracle(name).round(result, "zero") == result
    if oracle(name).scalar is not None:
        assert oracle(name).cast(result) == result


def spacing(value: float, name: str) -> float:
    """The distance of the two values of the format around one that is not on its grid."""
    ours = formats.get(name)
    if oracle(name).is_fixed:
        return 1.0
    return (
        max(math.ldexp(1.0, math.frexp(value)[1] - 1), ours.smallest_normal)
        * 2
        * (ours.unit_roundoff)
    )


@checked
@given(st.data(), any_format)
def test_up_and_down_are_one_grid_step_apart_unless_on_the_grid(data, name):
    info = oracle(name).info
    value = data.draw(st.floats(float(info.min), float(info.max)))
    down, up = one(value, name, "down"), one(value, name, "up")
    assert down <= value <= up
    assert up - down == (0 if value == down else spacing(value, name))


@checked
@given(st.data(), any_format)
def test_nearest_is_within_half_a_step_and_ties_go_to_even_or_away(data, name):
    info = oracle(name).info
    value = data.draw(st.floats(float(info.min), float(info.max)))
    down, up = one(value, name, "down"), one(value, name, "up")
    near, away = one(value, name, "near"), one(value, name, "near-away")
    if (value - down) != (up - value):
        nearer = down if value - down < up - value else up
        assert near == away == nearer
    elif up > down:
        assert near == (down if (down / (up - down)) % 2 == 0 else up)
        assert away == (up if value > 0 else down)


@checked
@given(number, any_format, random_word)
def test_zero_is_the_neighbour_toward_zero_and_stoc_one_of_the_two(value, name, word):
    down, up = one(value, name, "down"), one(value, name, "up")
    assert one(value, name, "zero") == (down if value > 0 else up)
    assert one(value, name, "stoc", word) in (down, up)
    seeded = torch.tensor([value], dtype=torch.float64)
    assert quantize(seeded, name, "stoc", seed=word).item() in (down, up)


@checked
@given(number, any_float, st.sampled_from(["near", "near-away", "zero", "stoc"]), random_word)
def test_modes_without_direction_are_odd(value, name, rounding, word):
    positive, negative = (one(v, name, rounding, word) for v in (value, -value))
    assert negative == -positive
    if oracle(name).info.has_nz:
        assert same(negative, -positive)


@checked
@given(number, any_float)
def test_up_mirrors_down(value, name):
    assert one(-value, name, "up") == -one(value, name, "down")


@checked
@given(st.data(), fixed, random_word)
def test_fixed_point_is_symmetric_within_the_positive_range(data, name, word):
    top = float(oracle(name).info.max)
    value = data.draw(st.floats(-top, top))
    for rounding in ("near", "near-away", "zero", "stoc"):
        assert one(-value, name, rounding, word) == -one(value, name, rounding, word)
    assert one(-value, name, "up") == -one(value, name, "down")


@checked
@given(finite, any_float, any_mode, random_word)
def test_flushing_subnormals_changes_nothing_else(value, name, rounding, word):
    normal = oracle(name).info.smallest_normal
    kept = one(value, name, rounding, word)
    flushed = one(value, name, rounding, word, subnormals=False)
    assert same(flushed, kept) if abs(kept) >= normal or kept == 0 else flushed == 0


moderate = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)


@checked
@given(st.lists(moderate, min_size=1, max_size=70), st.sampled_from(list(BLOCKS)), any_mode)
def test_blocks_keep_to_their_elements_grid(values, name, rounding):
    """Twice is once where the largest keeps its binade; results are near, ordered and bounded."""
    x = torch.tensor(values)
    result = quantize(x, name, rounding, **({"seed": 0} if rounding == "stoc" else {}))
    for start in range(0, len(x), 32):
        block, rounded = (t[start : start + 32].double() for t in (x, result))
        largest = block.abs().max().item()
        if largest == 0:
            assert (rounded == 0).all()
            continue
        element = oracle(BLOCKS[name][1])
        shared = 2.0 ** (math.frexp(largest)[1] - 1 - element.top_exponent)
        scaled = (rounded / shared).numpy()
        assert (element.round(scaled, "zero") == scaled).all()
        assert (scaled <= element.info.max).all()
        assert (scaled >= element.info.min).all()
        if math.frexp(rounded.abs().max().item())[1] == math.frexp(largest)[1]:
            again = quantize(result[start : start + 32], name, rounding="near")
            assert torch.equal(again.double(), rounded)
