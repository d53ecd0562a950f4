"""Number formats have the constants of the standards that define them."""

from dataclasses import FrozenInstanceError, replace

import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from halp import formats
from halp.formats import FloatFormat

#: The same formats as others define them: NumPy-style scalar type, torch dtype, gfloat's constants.
DEFINITIONS = {
    "fp32": (np.float32, torch.float32, gfloat.formats.format_info_binary32),
    "bf16": (ml_dtypes.bfloat16, torch.bfloat16, gfloat.formats.format_info_bfloat16),
    "fp16": (np.float16, torch.float16, gfloat.formats.format_info_binary16),
    "fp8_e4m3": (
        ml_dtypes.float8_e4m3fn,
        torch.float8_e4m3fn,
        gfloat.formats.format_info_ocp_e4m3,
    ),
}


@pytest.fixture
def registry(monkeypatch):
    """A copy of the registry, so that what a test registers is gone after it."""
    monkeypatch.setattr(formats, "_REGISTRY", dict(formats._REGISTRY))


def test_every_registered_format_is_compared_with_another_definition():
    assert set(formats.names()) == set(DEFINITIONS)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_constants_are_those_of_ml_dtypes(name):
    ours, finfo = formats.get(name), ml_dtypes.finfo(DEFINITIONS[name][0])
    assert ours.bits == finfo.bits
    assert ours.max == float(finfo.max)
    assert ours.smallest_normal == float(finfo.smallest_normal)
    assert ours.smallest_subnormal == float(finfo.smallest_subnormal)
    assert ours.unit_roundoff == float(finfo.eps) / 2
    assert ours.fraction_bits == finfo.nmant


@pytest.mark.parametrize("name", DEFINITIONS)
def test_constants_are_those_of_torch(name):
    ours, finfo = formats.get(name), torch.finfo(DEFINITIONS[name][1])
    assert ours.bits == finfo.bits
    assert ours.max == finfo.max
    assert ours.smallest_normal == finfo.smallest_normal
    assert ours.unit_roundoff == finfo.eps / 2


@pytest.mark.parametrize("name", DEFINITIONS)
def test_constants_are_those_of_gfloat(name):
    ours, theirs = formats.get(name), DEFINITIONS[name][2]
    assert ours.bits == theirs.k
    assert ours.exponent_bits == theirs.expBits
    assert ours.fraction_bits == theirs.tSignificandBits
    assert ours.bias == theirs.bias
    assert ours.max == theirs.max
    assert ours.smallest_normal == theirs.smallest_normal
    assert ours.smallest_subnormal == theirs.smallest_subnormal
    assert ours.has_infinity == (theirs.num_posinfs > 0)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3"])
def test_constants_are_those_of_the_list_of_all_values(name):
    """The list is every code, decoded by ml_dtypes or NumPy."""
    ours, scalar = formats.get(name), DEFINITIONS[name][0]
    codes = np.arange(2**ours.bits, dtype=f"uint{ours.bits}").view(scalar)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        codes = codes.astype(np.float64)
    values = np.unique(np.abs(codes[np.isfinite(codes)]))
    assert ours.max == values[-1]
    assert ours.smallest_subnormal == values[1]
    assert ours.has_infinity == np.isinf(codes).any()
    spacing = np.diff(values)
    first_binades = values[:-1] < 2 * ours.smallest_normal
    assert (spacing[first_binades] == ours.smallest_subnormal).all()
    assert (spacing[~first_binades] > ours.smallest_subnormal).all()
    normal = values[:-1] >= ours.smallest_normal
    assert (spacing[normal] / 2 / values[:-1][normal]).max() == ours.unit_roundoff


def test_every_registered_format_is_found_by_its_name():
    for name in formats.names():
        assert formats.get(name).name == name
        assert str(formats.get(name)) == name


def test_a_format_is_returned_as_it_is():
    unregistered = FloatFormat("e3m4", exponent_bits=3, fraction_bits=4)
    assert formats.get(unregistered) is unregistered


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown format 'fp17'; known formats: .*fp16"):
        formats.get("fp17")


@pytest.mark.parametrize("wrong", [16, None, torch.float16])
def test_what_is_no_name_is_refused(wrong):
    with pytest.raises(TypeError, match="a format is a name or a FloatFormat, not"):
        formats.get(wrong)


def test_a_registered_format_becomes_available(registry):
    mine = formats.register(FloatFormat("e3m4", exponent_bits=3, fraction_bits=4))
    assert formats.get("e3m4") is mine
    assert formats.names()[-1] == "e3m4"


def test_a_second_format_of_the_same_name_is_refused_and_changes_nothing(registry):
    known = formats.get("fp16")
    with pytest.raises(ValueError, match="a different format named 'fp16' is registered already"):
        formats.register(replace(known, fraction_bits=9))
    assert formats.get("fp16") == known


def test_registering_an_equal_format_again_is_harmless(registry):
    names = formats.names()
    formats.register(replace(formats.get("fp16")))
    assert formats.names() == names


def test_the_list_of_names_is_a_copy():
    formats.names().clear()
    assert "fp16" in formats.names()


def test_a_format_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        formats.get("fp16").fraction_bits = 9
