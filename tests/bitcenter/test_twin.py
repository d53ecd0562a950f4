"""Least squares with HALP equals a NumPy program in float16, bit for bit (row 9).

The data are powers of two, so that every sum of an inner step is exact in float32 whatever its
order: the twin checks that. Random bits are computed here from the hash that halp/random_bits.py
documents, in NumPy's integer arithmetic, and the sequence of roundings is written out.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import halp
from halp.random_bits import random_bits, stream_key
from tests.bitcenter.number_grids import GRIDS

SAMPLES, FEATURES, BATCH, T, STEPS = 8, 4, 4, 5, 10
LR, SEED = 2.0**-3, 7

#: One step takes a position in the stream of random bits for itself, then for what it rounds, in
#: this order: 1. the outputs' delta, 2. the loss's delta, 3. the delta of the outputs' gradient, 4.
#: that of the weights' gradient; then the solver rounds (bc-sgd) the offset of the weights'
#: gradient, the momentum buffer if there is one, and z. Inputs and offsets, whose bits would come
#: from their values, lie on the grid.


def mix(word: int) -> int:
    """triple32, of Python integers."""
    word ^= word >> 17
    word = word * 0xED5AD4BB % 2**32
    word ^= word >> 11
    word = word * 0xAC4C1B51 % 2**32
    word ^= word >> 15
    word = word * 0x31848BAB % 2**32
    return word ^ word >> 14


def uniform(count: int, position: int, bits: int) -> np.ndarray:
    """Return the numbers in (0, 1) that the rounding at a position of the stream compares with."""
    first = mix(mix(SEED) ^ position)
    second = mix((mix(0x9E3779B9) + first) % 2**32)
    x = np.arange(count, dtype=np.uint32)
    x ^= np.uint32(first)
    x ^= x >> np.uint32(17)
    x *= np.uint32(0xED5AD4BB)
    x ^= np.uint32(second)
    x ^= x >> np.uint32(11)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    x ^= x >> np.uint32(14)
    return ((x >> np.uint32(32 - bits)).astype(np.float64) + 0.5) * 2.0**-bits


def exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return ``a @ b``, having made sure that float32 loses nothing in any order of summation."""
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            terms = [Fraction(t) for t in a[i] * b[:, j] if t]
            if terms:
                unit = Fraction(1, max(t.denominator for t in terms))
                assert sum(map(abs, terms)) < 2**24 * unit, "the data make an inexact sum"
    return a @ b


def float32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float64)


class Twin:
    """bc-svrg or bc-sgd on least squares without bias, in NumPy."""

    def __init__(
        self,
        weights: np.ndarray,
        solver: str,
        format: str,
        rounding: str,
        scale: str | None,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
    ) -> None:
        self.solver = solver
        self.grid = GRIDS[format]
        self.rounding = rounding
        self.scale = scale
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.position = 0
        #: w̃ and z are rows, as in the weights of nn.Linear.
        self.offset = weights
        self.delta = np.zeros_like(weights)
        self.buffer: np.ndarray | None = None
        self.full_gradient: np.ndarray | None = None

    def round(self, x: np.ndarray, bits: int = 23) -> np.ndarray:
        """Round to nearest; or away from zero as often as the way there is of a spacing."""
        position, self.position = self.position, self.position + 1
        if self.rounding == "near":
            return self.grid.round(x, self.scale)
        steps = np.abs(x) / self.grid.spacing(x, self.scale)
        moves = uniform(x.size, position, bits).reshape(x.shape) <= steps - np.floor(steps)
        return np.copysign((np.floor(steps) + moves) * self.grid.spacing(x, self.scale), x)

    def gradient_at_offset(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        residual = float32(exact_product(x, self.offset.T) - y)
        return exact_product((2 / len(x) * residual).T, x)

    def snapshot(self, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        recentered = self.offset + self.delta
        assert np.array_equal(float32(recentered), recentered), "the data make an inexact sum"
        self.offset, self.delta = recentered, np.zeros_like(recentered)
        if self.solver == "bc-svrg":
            gradient = np.mean([self.gradient_at_offset(x, y) for x, y in batches], axis=0)
            # In float64, which draws more random bits.
            self.full_gradient = self.round(gradient + self.weight_decay * self.offset, bits=32)

    def step(self, x: np.ndarray, y: np.ndarray) -> None:
        self.position += 1
        assert np.array_equal(self.grid.round(x, self.scale), x)
        output = self.round(exact_product(x, self.delta.T))
        self.round(np.zeros(1))  # the loss's delta, which nothing depends on
        output_gradient = self.round(2 / len(x) * output)
        self.gradient = self.round(exact_product(output_gradient.T, x))
        second = self.full_gradient
        if self.solver == "bc-sgd":
            at_offset = self.gradient_at_offset(x, y)
            second = self.round(float32(at_offset + float32(self.weight_decay * self.offset)))
        direction = float32(self.gradient + second)
        direction = float32(direction + self.weight_decay * self.delta)
        if self.momentum:
            buffer = direction
            if self.buffer is not None:
                buffer = float32(direction + self.momentum * self.buffer)
            self.buffer = self.round(buffer)
            direction = float32(direction + self.momentum * buffer) if self.nesterov else buffer
        self.delta = self.round(float32(self.delta - LR * direction))


def powers_of_two() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, targets and first weights."""
    rng = np.random.default_rng(5)
    x = rng.choice([-1.0, 1.0], (SAMPLES, FEATURES)) * 2.0 ** -rng.integers(
        0, 2, (SAMPLES, FEATURES)
    )
    y = rng.choice([-1.0, 1.0], (SAMPLES, 1)) * 2.0 ** -rng.integers(0, 3, (SAMPLES, 1))
    return x, y, rng.choice([-1.0, 1.0], (1, FEATURES)) * 0.5


SOLVERS = {"bc-svrg": halp.optim.BitCenterSVRG, "bc-sgd": halp.optim.BitCenterSGD}
OPTIONS = {
    "plain": (0.0, False, 0.0),
    "momentum": (0.5, False, 0.0),
    "nesterov": (0.5, True, 0.0),
    "weight decay": (0.5, False, 2.0**-4),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("scale", ["auto", None])
@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("format", GRIDS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_ten_steps_of_least_squares_equal_a_numpy_twin_bit_for_bit(
    solver, format, rounding, scale, options
):
    momentum, nesterov, weight_decay = options
    inputs, targets, weights = powers_of_two()
    batches = [(inputs[i : i + BATCH], targets[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)]
    twin = Twin(weights, solver, format, rounding, scale, *options)

    model = nn.Linear(FEATURES, 1, bias=False)
    model.weight.data.copy_(torch.from_numpy(weights))
    halp.bit_center(model, format, rounding, scale=scale, seed=SEED)
    optimizer = SOLVERS[solver](
        model.parameters(),
        lr=LR,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        T=T,
    )
    state = optimizer.state[model.weight]
    loader = [tuple(torch.from_numpy(t).float() for t in batch) for batch in batches]

    def closure(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for step in range(STEPS):
        if optimizer.snapshot_due:
            optimizer.snapshot(loader, closure)
            twin.snapshot(batches)
            assert_same("w̃", model.weight.offset, twin.offset)
            assert_same("g̃", state.get("full_gradient"), twin.full_gradient)
        batch = step % len(batches)
        optimizer.step(lambda batch=batch: closure(*loader[batch]))
        twin.step(*batches[batch])
        assert_same(f"delta gradient {step}", model.weight.grad.delta, twin.gradient)
        assert_same(f"momentum buffer {step}", state.get("momentum_buffer"), twin.buffer)
        assert_same(f"z {step}", model.weight.delta, twin.delta)
    if format == "fp16":
        assert np.abs(twin.delta).max() > 0


def assert_same(what: str, computed: torch.Tensor | None, expected: np.ndarray | None) -> None:
    if computed is None or expected is None:
        assert computed is None and expected is None, what
        return
    assert computed.double().numpy().tolist() == expected.tolist(), what


def test_the_twins_random_numbers_are_those_of_the_library():
    bits = random_bits(torch.empty(50), stream_key(SEED, 3)).numpy().view(np.uint32)
    assert np.array_equal(uniform(50, 3, 32), (bits.astype(np.float64) + 0.5) * 2.0**-32)
