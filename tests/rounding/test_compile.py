"""Compiled rounding gives the bits of the eager one, without graph breaks."""

import shutil

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from halp import quantize
from tests.rarely import rarely_but
from tests.rounding.oracles import (
    BLOCKS,
    FLOATS,
    MODES,
    assert_same,
    oracle,
    random_patterns,
    with_largest,
)

HAS_COMPILER = bool(shutil.which("g++") or shutil.which("clang++"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a C++ compiler")

#: Every kind of scale, either overflow, with and without subnormals.
WAYS = {
    "plain": {},
    "flushed": {"overflow": "inf", "subnormals": False},
    "scaled": {"scale": 0.1, "overflow": "inf"},
    "auto": {"scale": "auto", "overflow": "inf"},
}
#: One format of each kind: what drops bits, what scales, what lacks infinity, what blocks.
KINDS = [("bf16", "plain"), ("bf16", "auto"), ("fp16", "scaled"), ("fp16", "auto")]
KINDS += [("fp8_e4m3", "flushed"), ("fp8_e5m2fnuz", "auto"), ("e9m2", "plain")]
KINDS += [("fixed8", "scaled"), ("fixed8", "auto"), ("mxint8", "plain"), ("mxfp8_e4m3", "flushed")]
#: The same where NaN may stand anywhere.
WITH_NAN = [("fp8_e5m2", "plain"), ("bf16", "flushed"), ("fp8_e4m3", "auto")]
EVERY_FORMAT = [*FLOATS, *BLOCKS, "e5m7", "e8m1", "e9m2", "e11m3", "fixed2", "fixed8", "fixed32"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def data(carrier: type) -> list[np.ndarray]:
    """Arrays of one shape: random bits, then without NaN or infinities, and chosen magnitudes."""
    x = random_patterns(carrier, 4096, seed=5)
    finite = np.where(np.isfinite(x), x, carrier(1))
    magnitudes = [100.0, 1e-38, 2e-38, 1e-40, 1e34, 1e36, 3e38, 448 * 1.01, 65504 / 8]
    magnitudes += [1e300] if carrier is np.float64 else []
    scaled = [np.resize(with_largest(largest, carrier), len(x)) for largest in magnitudes]
    subnormal = np.finfo(carrier).smallest_subnormal * np.arange(-2048, 2048).astype(carrier)
    infinities = np.where(np.isnan(x), carrier(1), x)
    return [x, infinities, finite, np.zeros_like(x), subnormal, *scaled]


def has_nan(name: str) -> bool:
    return oracle(BLOCKS[name][1] if name in BLOCKS else name).has_nan


def assert_compiled_is_eager(cases, roundings, backend, carrier) -> None:
    """One graph for all cases: (format, way)."""

    def all_of_them(x, seed):
        return [
            quantize(x, name, rounding, seed=seed, **WAYS[way])
            for name, way in cases
            for rounding in roundings
        ]

    compiled = torch.compile(all_of_them, fullgraph=True, backend=backend)
    with_nan = all(has_nan(name) for name, _ in cases)
    for x in data(carrier)[0 if with_nan else 1 :]:
        arguments = torch.from_numpy(x), torch.tensor(3)
        results = compiled(*arguments), all_of_them(*arguments)
        for ours, eager in zip(*results, strict=True):
            assert_same(ours.numpy(), eager.numpy(), x)


@pytest.mark.parametrize("rounding", rarely_but(["near"], [*MODES, "stoc", "void"]))
def test_compiled_rounding_is_the_eager_one(rounding):
    assert_compiled_is_eager(KINDS, [rounding], "aot_eager", np.float32)


@pytest.mark.slow
def test_compiled_rounding_is_the_eager_one_beside_nan():
    assert_compiled_is_eager(WITH_NAN, ["near", "stoc", "up"], "aot_eager", np.float32)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["near", "stoc"])
def test_inductor_rounds_as_eager_code_does(rounding):
    assert_compiled_is_eager(WITH_NAN, [rounding], "inductor", np.float32)


@needs_compiler
@pytest.mark.parametrize("name", rarely_but(["fp8_e5m2fnuz"], ["fp8_e5m2fnuz", "fixed8", "mxint8"]))
def test_inductor_keeps_negative_zero_out_of_formats_without(name):
    """It takes adding a zero for nothing to do."""
    assert_compiled_is_eager([(name, "plain")], ["near", "zero"], "inductor", np.float32)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, way",
    dict.fromkeys(
        [*((name, way) for name in EVERY_FORMAT for way in ("plain", "auto")), *KINDS, *WITH_NAN]
    ),
)
def test_every_format_and_mode_compiles_to_the_eager_bits(name, way):
    assert_compiled_is_eager([(name, way)], [*MODES, "stoc", "void"], "inductor", np.float32)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("way", ["plain", "auto"])
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "e11m3", "fixed8", "mxfp8_e4m3"])
def test_float64_compiles_to_the_eager_bits(name, way):
    assert_compiled_is_eager([(name, way)], [*MODES, "stoc", "void"], "inductor", np.float64)


@pytest.mark.parametrize(
    "dtype",
    rarely_but([torch.bfloat16], [torch.float16, torch.bfloat16, torch.float64]),
    ids=str,
)
def test_other_dtypes_compile_too(dtype):
    def rounded(x, seed):
        return [
            quantize(x, name, rounding, seed=seed)
            for name in ("bf16", "fp8_e4m3", "e11m3")
            for rounding in ("near", "stoc", "up")
        ]

    compiled = torch.compile(rounded, fullgraph=True, backend="aot_eager")
    patterns = torch.from_numpy(random_patterns(np.float64, 4096, seed=6).copy()).view(dtype)
    arguments = patterns, torch.tensor(3)
    unsigned = torch.int16 if dtype.itemsize == 2 else torch.int64
    for ours, eager in zip(compiled(*arguments), rounded(*arguments), strict=True):
        same = (ours.view(unsigned) == eager.view(unsigned)) | (ours.isnan() & eager.isnan())
        assert same.all()


def test_given_random_bits_and_tensor_scales_compile():
    def rounded(x, scale, bits):
        return quantize(x, "fp8_e4m3", "stoc", scale=scale, random_bits=bits)

    compiled = torch.compile(rounded, fullgraph=True, backend="aot_eager")
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    scale = torch.logspace(-3, 3, 64)[:, None]
    for dtype in (torch.uint8, torch.int16, torch.int32):
        bits = torch.randint(0, 256, x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(compiled(x, scale, bits), rounded(x, scale, bits))


@pytest.mark.parametrize("count", [1, 8])
def test_a_limited_number_of_random_bits_compiles(count):
    def rounded(x, seed):
        return [
            quantize(x, name, "stoc", random_bits=count, seed=seed) for name in ("bf16", "fixed8")
        ]

    compiled = torch.compile(rounded, fullgraph=True, backend="aot_eager")
    arguments = torch.randn(4096, generator=torch.Generator().manual_seed(0)), torch.tensor(1)
    for ours, eager in zip(compiled(*arguments), rounded(*arguments), strict=True):
        assert torch.equal(ours, eager)


HALFWAY = torch.full((10_000,), 1 + 2**-11)


def test_a_new_seed_does_not_recompile():
    counter = CompileCounter()
    compiled = torch.compile(quantize, fullgraph=True, backend=counter)
    results = [
        compiled(HALFWAY, "fp16", "stoc", seed=torch.tensor(seed))
        for seed in (0, 1, 2, 1 << 40, -1)
    ]
    assert counter.frame_count == 1
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[2], quantize(HALFWAY, "fp16", "stoc", seed=2))


def test_compiled_rounding_draws_from_the_global_generator():
    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first, second = (compiled(HALFWAY, "fp16", "stoc") for _ in range(2))
        torch.manual_seed(1)
        assert torch.equal(compiled(HALFWAY, "fp16", "stoc"), first)
    assert not torch.equal(first, second)
