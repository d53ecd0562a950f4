"""Fixed-point HALP and LP-SVRG do what the theory says of them (design sections 2 and 6)."""

import numpy
import pytest

from paper_problems import LeastSquares, ill_conditioned
from paper_runs import carry_out, halp_fixed, low_precision
from tests.optim import convergence_runs
from tests.optim.convergence_runs import LongRun, gradient_norms
from tests.rarely import rarely_but

SEEDS = [
    0,
    pytest.param(1, marks=pytest.mark.slow),
    *(pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for seed in (2, 3, 4)),
]

#: Bits of fixed-point HALP by 1/μ = κ: diverging, contracting.
THRESHOLDS = {10: ((4, 5, 6), (8, 9, 10)), 100: ((6, 7, 8), (10, 11, 12))}


def progress(bits: int, condition: int, seed: int) -> float:
    """Last ‖∇f‖ over the first of HALP with the true μ, over ten cycles."""
    return carry_out(
        halp_fixed(ill_conditioned(seed, condition), 10, bits, mu=1 / condition)
    ).progress


# Rounding to nearest.


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_to_nearest_halp_makes_exactly_zero_progress(bits, seed):
    """Since a·μ·(2^b − 2)·max|g̃_j| < ‖g̃‖, each update is less than half a step of z's grid."""
    problem = ill_conditioned(seed, 10)
    a, y = (part.numpy() for part in problem.data)
    g = a.T @ y / len(a)
    assert problem.lr * 0.1 * (2**bits - 2) * abs(g).max() < numpy.linalg.norm(g)
    outcome = carry_out(halp_fixed(problem, 2, bits, mu=0.1, rounding="near"))
    assert outcome.norms == (outcome.norms[0],) * 3
    assert outcome.losses == (outcome.losses[0],) * 3


@pytest.mark.parametrize("seed", range(5))
def test_to_nearest_halp_moves_once_the_largest_update_is_half_a_step(seed):
    problem = ill_conditioned(seed, 10)
    a, y = (part.numpy() for part in problem.data)
    g = a.T @ y / len(a)
    assert problem.lr * 0.1 * (2**10 - 2) * abs(g).max() > numpy.linalg.norm(g)
    outcome = carry_out(halp_fixed(problem, 1, 10, mu=0.1, rounding="near"))
    assert outcome.norms[1] < outcome.norms[0]


# How many bits are needed.


@pytest.mark.parametrize("condition", rarely_but([10], THRESHOLDS))
@pytest.mark.parametrize("seed", SEEDS)
def test_at_the_thresholds_halp_diverges_or_contracts(condition, seed):
    below, above = THRESHOLDS[condition]
    assert progress(below[-1], condition, seed) > 10
    assert progress(above[0], condition, seed) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("condition", THRESHOLDS)
@pytest.mark.parametrize("seed", range(2))
def test_with_fewer_bits_halp_diverges_and_with_more_it_contracts(condition, seed):
    below, above = THRESHOLDS[condition]
    assert min(progress(bits, condition, seed) for bits in below) > 10
    assert max(progress(bits, condition, seed) for bits in above) < 0.1


# LP-SVRG.


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_floor_of_lp_svrg_falls_by_one_bit_a_bit(seed):
    bits = numpy.arange(8, 17, 2)
    floors = [
        carry_out(low_precision(LeastSquares(seed), "lp-svrg", 16, int(b))).floor() for b in bits
    ]
    slope = numpy.polyfit(bits, numpy.log2(floors), 1)[0]
    assert slope == pytest.approx(-1, abs=0.1), f"floors {floors} at {bits} bits"


# μ.


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_halp_in_8_bits_is_best_at_3_to_10_times_the_true_mu(seed):
    """Against μ its final ‖∇f‖ falls to a minimum and rises again."""
    mus = (0.01, 0.03, 0.1, 0.3, 1, 3, 10)
    finals = [carry_out(halp_fixed(LeastSquares(seed), 10, 8, mu=mu)).progress for mu in mus]
    best = int(numpy.argmin(finals))
    assert mus[best] in (0.3, 1), f"{finals} at {mus}"
    assert finals[: best + 1] == sorted(finals[: best + 1], reverse=True)
    assert finals[best:] == sorted(finals[best:])


# Row 5.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "mu", "bound"), [("fixed16", 0.1, 1e-14), ("fixed8", 0.5, 1e-11)]
)
@pytest.mark.parametrize("seed", range(5))
def test_halp_in_fixed_point_converges(format, mu, bound, seed):
    problem = convergence_runs.LeastSquares(seed)
    precision = (("format", format), ("rounding", "stoc"))
    norms = gradient_norms(LongRun(problem, "BitCenterSVRG", precision, mu=mu))
    assert norms[-1] < bound, f"‖∇f‖ every 5 cycles: {norms[::5]}"
