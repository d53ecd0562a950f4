"""Number formats have the constants of the standards that define them."""

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, is_dataclass, replace

import ml_dtypes
import numpy as np
import pytest
import torch

from halp import formats
from halp.formats import BlockFormat, FixedFormat, FloatFormat
from tests.rounding.oracles import BLOCKS, CONSTRUCTED, FIXED, FLOATS, oracle

FLOAT_NAMES = [*FLOATS, *CONSTRUCTED]
IN_ML_DTYPES = [name for name in FLOAT_NAMES if oracle(name).scalar is not None]
IN_TORCH = [name for name in FLOAT_NAMES if oracle(name).dtype is not None]
EVERY_NAME = [*FLOAT_NAMES, *FIXED, *BLOCKS]


@pytest.fixture
def registry(monkeypatch):
    """A copy of the registry, so that what a test registers is gone after it."""
    monkeypatch.setattr(formats, "_REGISTRY", dict(formats._REGISTRY))


# --- constants


def test_every_registered_format_is_compared_with_another_definition():
    assert set(FLOATS) | set(BLOCKS) <= set(formats.names())
    assert set(formats.names()) <= set(EVERY_NAME)


@pytest.mark.parametrize("name", IN_ML_DTYPES)
def test_constants_are_those_of_ml_dtypes(name):
    ours, finfo = formats.get(name), ml_dtypes.finfo(oracle(name).scalar)
    assert ours.bits == finfo.bits
    assert ours.max == float(finfo.max)
    assert ours.min == float(finfo.min)
    assert ours.smallest_normal == float(finfo.smallest_normal)
    assert ours.smallest_subnormal == float(finfo.smallest_subnormal)
    assert ours.unit_roundoff == float(finfo.eps) / 2
    assert ours.fraction_bits == finfo.nmant


@pytest.mark.parametrize("name", IN_TORCH)
def test_constants_are_those_of_torch(name):
    ours, finfo = formats.get(name), torch.finfo(oracle(name).dtype)
    assert ours.bits == finfo.bits
    assert ours.max == finfo.max
    assert ours.min == finfo.min
    assert ours.smallest_normal == finfo.smallest_normal
    if name != "fp8_e5m2fnuz":  # for which torch says 1/8, and casts to multiples of 1/4
        assert ours.unit_roundoff == finfo.eps / 2


@pytest.mark.parametrize("name", [*FLOAT_NAMES, *FIXED])
def test_constants_are_those_of_gfloat(name):
    ours, theirs = formats.get(name), oracle(name).info
    assert ours.bits == theirs.k
    assert ours.max == theirs.max
    assert ours.min == theirs.min
    assert ours.smallest_subnormal == theirs.smallest_subnormal
    assert ours.has_infinity == (theirs.num_posinfs > 0)
    assert ours.has_nan == (theirs.num_nans > 0)
    assert ours.has_negative_zero == theirs.has_nz
    if isinstance(ours, FloatFormat):
        assert ours.exponent_bits == theirs.expBits
        assert ours.fraction_bits == theirs.tSignificandBits
        assert ours.bias == theirs.bias
        assert ours.smallest_normal == theirs.smallest_normal
        assert ours.unit_roundoff == theirs.eps / 2


def test_the_widest_format_is_float64():
    ours, finfo = formats.get("e11m52"), np.finfo(np.float64)
    assert (ours.max, ours.min) == (finfo.max, finfo.min)
    assert ours.smallest_normal == finfo.smallest_normal
    assert ours.smallest_subnormal == finfo.smallest_subnormal
    assert ours.unit_roundoff == finfo.eps / 2
    assert ours.bits == 64


@pytest.mark.parametrize("name", [name for name in FLOAT_NAMES if oracle(name).info.k <= 16])
def test_constants_are_those_of_the_list_of_all_values(name):
    """The list is every code, decoded by ml_dtypes, NumPy or gfloat."""
    ours, values = formats.get(name), oracle(name).values
    assert (ours.min, ours.max) == (values[0], values[-1])
    values = values[values >= 0]
    assert ours.smallest_subnormal == values[1]
    spacing = np.diff(values)
    first_binades = values[:-1] < 2 * ours.smallest_normal
    assert (spacing[first_binades] == ours.smallest_subnormal).all()
    assert (spacing[~first_binades] > ours.smallest_subnormal).all()
    normal = values[:-1] >= ours.smallest_normal
    assert (spacing[normal] / 2 / values[:-1][normal]).max() == ours.unit_roundoff


@pytest.mark.parametrize("bits", [2, 3, 8, 16, 32])
def test_fixed_point_is_twos_complement(bits):
    ours = formats.get(f"fixed{bits}")
    assert isinstance(ours, FixedFormat)
    assert ours.bits == bits
    assert (ours.min, ours.max) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert ours.smallest_normal == ours.smallest_subnormal == 1
    assert not (ours.has_infinity or ours.has_nan or ours.has_negative_zero)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_fixed_point_has_the_range_of_numpys_integers(bits):
    ours, iinfo = formats.get(f"fixed{bits}"), np.iinfo(f"int{bits}")
    assert (ours.min, ours.max) == (iinfo.min, iinfo.max)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_the_elements_and_the_size_of_gfloats(name):
    ours, theirs = formats.get(name), BLOCKS[name][0]
    assert isinstance(ours, BlockFormat)
    assert ours.block_size == theirs.k
    assert ours.bits * theirs.k == theirs.block_size_bytes * 8
    assert ours.element.bits == theirs.etype.k
    assert ours.element.max == theirs.etype.max
    assert ours.element.min == theirs.etype.min
    assert ours.element.smallest_subnormal == theirs.etype.smallest_subnormal
    assert ours.has_nan == (theirs.etype.num_nans > 0)
    assert ours.has_negative_zero == theirs.etype.has_nz
    assert ours.max == theirs.etype.max * theirs.stype.max
    assert ours.min == theirs.etype.min * theirs.stype.max
    assert ours.smallest_subnormal == theirs.etype.smallest_subnormal * theirs.stype.smallest
    assert ours.unit_roundoff == ours.element.unit_roundoff


def test_ocp_elements_are_the_formats_of_the_same_name():
    for name, (_, element) in BLOCKS.items():
        if name != "mxint8":
            assert formats.get(name).element is formats.get(element)


# --- names


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_format_is_found_by_its_name_and_prints_it(name, capsys):
    ours = formats.get(name)
    assert ours.name == name == str(ours)
    print(ours)
    assert capsys.readouterr().out == f"{name}\n"
    assert f"{ours}" == name
    assert repr(name) in repr(ours)
    assert formats.get(name) == ours
    assert hash(formats.get(name)) == hash(ours)


@pytest.mark.parametrize("exponent_bits", [2, 5, 8, 11])
@pytest.mark.parametrize("fraction_bits", [1, 7, 23, 52])
def test_a_name_spells_the_bits_of_an_ieee_like_format(exponent_bits, fraction_bits):
    ours = formats.get(f"e{exponent_bits}m{fraction_bits}")
    assert (ours.exponent_bits, ours.fraction_bits) == (exponent_bits, fraction_bits)
    assert ours.bits == 1 + exponent_bits + fraction_bits
    assert ours.bias == 2 ** (exponent_bits - 1) - 1
    assert ours.max == 2.0**ours.bias * (2 - 2.0**-fraction_bits)
    assert ours.smallest_normal == 2.0 ** (1 - ours.bias)
    assert ours.smallest_subnormal == math.ldexp(1, 1 - ours.bias - fraction_bits)
    assert ours.unit_roundoff == 2.0 ** -(fraction_bits + 1)
    assert ours.has_infinity and ours.has_nan and ours.has_negative_zero


@pytest.mark.parametrize(
    "name, constructed", [("tf32", "e8m10"), ("bf16", "e8m7"), ("fp16", "e5m10")]
)
def test_a_standard_name_and_its_bits_mean_the_same(name, constructed):
    assert replace(formats.get(constructed), name=name) == formats.get(name)


def test_ocps_e4m3_is_not_the_ieee_like_one():
    assert formats.get("fp8_e4m3").max == 448
    assert formats.get("e4m3").max == 240


@pytest.mark.parametrize(
    "name",
    ["e1m3", "e0m3", "e12m3", "e5m0", "e5m53", "e99m99", "fixed0", "fixed1", "fixed33", "fixed999"],
)
def test_sizes_that_cannot_be_emulated_are_refused(name):
    with pytest.raises(ValueError, match=r"\d+ to \d+ (exponent )?bits.*, not \d+"):
        formats.get(name)


@pytest.mark.parametrize(
    "name",
    ["fp17", "", "e5", "m3", "e5m", "E5M2", "e-5m2", "e5m2 ", " fp16", "fp16\n", "e5m2fnuz"]
    + ["fixed", "fixed-8", "fixed8.0", "Fixed8", "mxfp16", "FP16", "float16", "e٥m٢"],
)
def test_an_unknown_name_is_answered_with_the_known_ones(name):
    with pytest.raises(ValueError, match="unknown format .*; known formats: .*fp16.*fixed"):
        formats.get(name)


@pytest.mark.parametrize("wrong", [16, None, torch.float16, b"fp16", FloatFormat])
def test_what_is_no_name_is_refused(wrong):
    with pytest.raises(TypeError, match="a format is a name.*, not"):
        formats.get(wrong)


# --- construction and registration


def test_a_format_is_returned_as_it_is():
    unregistered = FloatFormat("mine", exponent_bits=3, fraction_bits=4)
    assert formats.get(unregistered) is unregistered


@pytest.mark.parametrize("bits", [(1, 3), (12, 3), (5, 0), (5, 53), (-1, 3)])
def test_a_float_format_of_an_impossible_size_is_refused(bits):
    with pytest.raises(ValueError, match="2 to 11 exponent bits and 1 to 52 fraction bits, not"):
        FloatFormat("mine", *bits)


@pytest.mark.parametrize("bits", [-8, 0, 1, 33])
def test_a_fixed_format_of_an_impossible_size_is_refused(bits):
    with pytest.raises(ValueError, match=f"2 to 32 bits, not {bits}"):
        FixedFormat("mine", bits)


def test_a_registered_format_becomes_available(registry):
    mine = formats.register(FloatFormat("mine", exponent_bits=3, fraction_bits=4))
    assert formats.get("mine") is mine
    assert formats.names()[-1] == "mine"


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


@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_format_is_frozen(name):
    ours = formats.get(name)
    assert is_dataclass(ours)
    with pytest.raises(FrozenInstanceError):
        ours.name = "other"
    with pytest.raises((FrozenInstanceError, AttributeError)):
        ours.max = 1.0


def test_asking_for_a_constructed_format_does_not_register_it():
    names = formats.names()
    formats.get("e3m7"), formats.get("fixed5")
    assert formats.names() == names


# --- the table


def test_the_table_has_a_row_for_every_format_with_its_constants():
    command = [sys.executable, "-m", "halp.formats"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.split()}
    head = rows["format"]
    for name in formats.names():
        ours, row = formats.get(name), dict(zip(head, rows[name], strict=True))
        assert float(row["bits"]) == ours.bits
        assert float(row["max"]) == pytest.approx(ours.max, rel=1e-5)
        assert float(row["normal"]) == pytest.approx(ours.smallest_normal, rel=1e-3)
        assert float(row["subnormal"]) == pytest.approx(ours.smallest_subnormal, rel=1e-3)
        assert float(row["roundoff"]) == pytest.approx(ours.unit_roundoff, rel=5e-2)
        yes = {True: "yes", False: "no"}
        assert row["inf"] == yes[ours.has_infinity]
        assert row["NaN"] == yes[ours.has_nan]
        assert row["-0"] == yes[ours.has_negative_zero]
        assert row["bias"] == str(getattr(ours, "bias", "-"))
