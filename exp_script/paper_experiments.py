"""The experiments of ``reproduce_paper.py``: what is run, what the paper claims, what is drawn.

The paper: De Sa et al., "High-Accuracy Low-Precision Training", arXiv 1803.03383.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any

import numpy

import paper_figures as figures
from paper_claims import Claim, Outcomes, follows_svrg, goes_below
from paper_problems import LeastSquares, digits, ill_conditioned, mnist
from paper_runs import MU, Outcome, Run, halp_fixed, low_precision

QUICK_CYCLES = 8
"""Of the quick runs on least squares, most of which have parts in several experiments.

Rounding noise and samples move what is measured after so many cycles by a factor of three from
seed to seed. SVRG then is at a four-hundredth of LP-SVRG's floor in 8 bits or lower, and LP-SVRG
in 12 bits has been at its own for half of the time. After six cycles neither was so.
"""


class Experiment(ABC):
    """Runs by key, the claims that they decide, and a figure.

    Args:
        quick: fewer, shorter runs.
        seed: of data, samples and rounding.
        data_dir: where MNIST lies; None leaves it out.
    """

    title: str
    file_name: str
    panels = 1  # of the figure, side by side

    def __init__(self, quick: bool, seed: int, data_dir: str | None) -> None:
        self.quick = quick
        self.seed = seed
        self.data_dir = data_dir

    @abstractmethod
    def runs(self) -> dict[Hashable, Run]:
        """What has to be run."""

    @abstractmethod
    def claims(self, outcomes: Outcomes) -> list[Claim]:
        """Compare what was measured, by the keys of `runs`, with the paper."""

    @abstractmethod
    def draw(self, figure: Any, outcomes: Outcomes) -> None:
        """Draw what was measured into an empty matplotlib figure."""

    def least_squares(self) -> LeastSquares:
        """The problem of all experiments but c and e."""
        return LeastSquares(self.seed)


class Solvers(Experiment):
    """(a) All solvers on least squares."""

    title = "Solvers on least squares"
    file_name = "solvers"

    def runs(self) -> dict[Hashable, Run]:
        """By label."""
        problem, cycles = self.least_squares(), QUICK_CYCLES if self.quick else 20
        runs = [Run(problem, "svrg", cycles)]
        if not self.quick:
            runs.append(Run(problem, "sgd", cycles))
            runs += [low_precision(problem, "lp-sgd", cycles, bits) for bits in (8, 16)]
        for bits in (8,) if self.quick else (8, 16):
            runs.append(low_precision(problem, "lp-svrg", cycles, bits))
        runs += [halp_fixed(problem, cycles, bits) for bits in (8, 16)]
        return {run.label: run for run in runs}

    def claims(self, outcomes: Outcomes) -> list[Claim]:
        """Rates and floors."""
        claims = [follows_svrg(outcomes, "HALP fixed16", 1.5)]
        for bits in (8, 16):
            if f"LP-SVRG fixed{bits}" in outcomes:
                claims.append(goes_below(outcomes, bits, 100))
        if "SGD" in outcomes:
            floor = min(o.floor() for label, o in outcomes.items() if "SGD" in label)
            halp = max(outcomes[f"HALP fixed{bits}"].final for bits in (8, 16))
            claims.append(
                Claim(
                    "SGD with a constant step stalls, in any precision; HALP does not",
                    f"SGD and LP-SGD ‖∇f‖ ≥ {floor:.1e}, HALP ≤ {halp:.1e}",
                    halp < 1e-4 * floor,
                )
            )
        return claims

    def draw(self, figure: Any, outcomes: Outcomes) -> None:
        """‖∇f‖ against cycles."""
        axes = figure.add_subplot()
        figures.draw_convergence(axes, outcomes)
        axes.set_title("Least squares: HALP follows SVRG, LP-SVRG stalls at its format's floor")


class Floor(Experiment):
    """(b) LP-SVRG's floor against the bits of its format."""

    title = "LP-SVRG's floor against bits"
    file_name = "floor"

    @property
    def margin(self) -> float:
        """What the slope may be off by.

        A floor is a mean of few random ‖∇f‖. Over twelve seeds the slope's standard deviation is
        0.06 with two formats and QUICK_CYCLES; a floor that went with the step's square root would
        have −0.5. Five formats and longer runs leave less to chance.
        """
        return 0.25 if self.quick else 0.1

    def runs(self) -> dict[Hashable, Run]:
        """By number of bits."""
        bits, cycles = ((8, 12), QUICK_CYCLES) if self.quick else ((8, 10, 12, 14, 16), 20)
        return {b: low_precision(self.least_squares(), "lp-svrg", cycles, b) for b in bits}

    def claims(self, outcomes: Outcomes) -> list[Claim]:
        """The slope."""
        slope, _ = self._line(outcomes)
        return [
            Claim(
                "LP-SVRG ends at a floor in proportion to its format's step: one bit a bit",
                f"log2 of the floor against bits: slope {slope:.2f}",
                abs(slope + 1) <= self.margin,
            )
        ]

    def draw(self, figure: Any, outcomes: Outcomes) -> None:
        """The floors, and a line of slope −1."""
        axes = figure.add_subplot()
        floors = {bits: outcome.floor() for bits, outcome in outcomes.items()}
        slope, middle = self._line(outcomes)
        figures.draw_floor(axes, floors, middle)
        axes.set_title(f"LP-SVRG on least squares: each bit halves the floor (slope {slope:.2f})")

    @staticmethod
    def _line(outcomes: Outcomes) -> tuple[float, tuple[float, float]]:
        """Slope of log2 of the floor, and the point (bits, floor) that fitted lines go through."""
        bits = numpy.array(list(outcomes))
        logs = numpy.log2([outcome.floor() for outcome in outcomes.values()])
        slope = float(numpy.polyfit(bits, logs, 1)[0])
        return slope, (float(bits.mean()), float(2 ** logs.mean()))


class Bits(Experiment):
    """(c) The bits that HALP needs against the condition number."""

    title = "Bits that HALP needs against κ"
    file_name = "bits"
    thresholds = {10: (6, 8), 100: (8, 10)}  # κ: it diverges up to and contracts from these bits

    def runs(self) -> dict[Hashable, Run]:
        """By κ and bits, and one for each number of bits that rounds to nearest."""
        cycles = 4 if self.quick else 6
        grid = [(condition, b) for condition, bits in self.thresholds.items() for b in bits]
        if not self.quick:
            grid = [(condition, b) for condition in (3, 10, 30, 100, 300) for b in range(4, 13)]
        runs: dict[Hashable, Run] = {}
        for condition, bits in grid:
            problem = ill_conditioned(self.seed, condition)
            runs[condition, bits] = halp_fixed(problem, cycles, bits, mu=1 / condition)
        for bits in (8,) if self.quick else (4, 6, 8):
            problem = ill_conditioned(self.seed, 10)
            near = halp_fixed(problem, 1, bits, mu=0.1, rounding="near")
            runs["near", bits] = near
        return runs

    def claims(self, outcomes: Outcomes) -> list[Claim]:
        """Thresholds, growth with κ, and rounding to nearest."""
        claims = [self._threshold(outcomes, condition) for condition in self.thresholds]
        needed = self._needed(outcomes)
        if not self.quick:
            conditions = sorted(needed)
            bits = [needed[condition] for condition in conditions]
            growth = numpy.polyfit(numpy.log10(conditions), bits, 1)[0]
            claims.append(
                Claim(
                    "the bits that HALP needs grow like log κ",
                    ", ".join(f"κ {c}: {b:.0f}" for c, b in zip(conditions, bits, strict=True))
                    + f"; {growth:.1f} bits for each tenfold κ",
                    bits == sorted(bits) and 1 < growth < math.log2(10) + 0.5,
                )
            )
        near = {key[1]: o for key, o in outcomes.items() if key[0] == "near"}
        claims.append(
            Claim(
                "rounding must be stochastic: to nearest HALP makes no progress at all (μ 0.1)",
                f"‖∇f‖ to nearest at {listed(near)} bits: "
                + ", ".join(f"{o.progress:.15g}" for o in near.values())
                + " of what it was",
                all(o.norms[-1] == o.norms[0] for o in near.values()),
            )
        )
        return claims

    def draw(self, figure: Any, outcomes: Outcomes) -> None:
        """Progress by κ and bits."""
        axes = figure.add_subplot()
        progress = {key: o.progress for key, o in outcomes.items() if key[0] != "near"}
        figures.draw_grid(figure, axes, progress, self._needed(outcomes))
        axes.set_title("HALP in fixed point: bits needed grow with log κ (μ = 1/κ)")

    def _threshold(self, outcomes: Outcomes, condition: int) -> Claim:
        low, high = self.thresholds[condition]
        progress = {b: o.progress for (c, b), o in outcomes.items() if c == condition}
        below = {b: p for b, p in progress.items() if b <= low}
        above = {b: p for b, p in progress.items() if b >= high}
        return Claim(
            f"at κ {condition} HALP diverges up to {low} bits and contracts from {high} bits",
            f"‖∇f‖ grows ≥ {min(below.values()):.1e} times up to {low} bits, and falls to "
            f"≤ {max(above.values()):.1e} from {high} bits",
            min(below.values()) > 1 and max(above.values()) < 0.5,
        )

    @staticmethod
    def _needed(outcomes: Outcomes) -> dict[int, float]:
        """By κ, the smallest number of bits from which on ‖∇f‖ at least halves."""
        needed = {}
        for condition in {key[0] for key in outcomes if key[0] != "near"}:
            bits = {b: o.progress < 0.5 for (c, b), o in outcomes.items() if c == condition}
            fails = [b for b, contracts in bits.items() if not contracts]
            above = [b for b in bits if b > max(fails, default=0)]
            needed[condition] = min(above, default=math.inf)
        return needed


class Mu(Experiment):
    """(d) HALP in 8 bits against μ, which decides the step and the range of z."""

    title = "8-bit HALP against μ"
    file_name = "mu"
    true = 0.1

    def runs(self) -> dict[Hashable, Run]:
        """By μ."""
        mus: tuple[float, ...] = (0.03, 0.3, 3)
        cycles = QUICK_CYCLES
        if not self.quick:
            mus, cycles = (0.01, 0.03, 0.1, 0.3, 1, 3, 10), 10
        return {mu: halp_fixed(self.least_squares(), cycles, 8, mu=mu) for mu in mus}

    def claims(self, outcomes: Outcomes) -> list[Claim]:
        """Where the minimum is, and that both sides of it are worse."""
        finals = {mu: outcome.progress for mu, outcome in outcomes.items()}
        best = min(finals, key=lambda mu: finals[mu])
        ends = finals[min(finals)], finals[max(finals)]
        return [
            Claim(
                "μ trades range for precision: 8-bit HALP is best at 3 to 10 times the true μ",
                f"best at {best / self.true:.0f} times μ, where ‖∇f‖ falls to {finals[best]:.1e}; "
                f"{ends[0]:.1e} at {min(finals) / self.true:.1f} times, "
                f"{ends[1]:.1e} at {max(finals) / self.true:.0f} times",
                2.99 <= best / self.true <= 10.01 and min(ends) > 10 * finals[best],
            )
        ]

    def draw(self, figure: Any, outcomes: Outcomes) -> None:
        """Progress against μ."""
        axes = figure.add_subplot()
        figures.draw_mu(axes, {mu: o.progress for mu, o in outcomes.items()}, self.true)
        axes.set_title("8-bit HALP on least squares: best at 3 to 10 times the true μ")


class SoftmaxRegression(Experiment):
    """(e) Softmax regression on digits and on MNIST."""

    title = "Softmax regression on digits and MNIST"
    file_name = "softmax"
    halp_mu = {"digits": 0.03, "mnist": 0.1}  # λ, a lower bound of the true one, is 0.01

    @property
    def panels(self) -> int:  # type: ignore[override]
        """One a data set."""
        return 1 if self.quick or self.data_dir is None else 2

    def runs(self) -> dict[Hashable, Run]:
        """By data set and label."""
        problems = [(digits(self.seed), 6 if self.quick else 12)]
        if self.data_dir is not None and not self.quick:
            problems.append((mnist(self.seed, self.data_dir), 6))
        runs: dict[Hashable, Run] = {}
        for problem, cycles in problems:
            mu = self.halp_mu[problem.dataset]
            lines = [Run(problem, "svrg", cycles), low_precision(problem, "lp-svrg", cycles, 16)]
            lines += [
                halp_fixed(problem, cycles, b, mu=mu) for b in ((16,) if self.quick else (8, 16))
            ]
            runs |= {(problem.dataset, run.label): run for run in lines}
        return runs

    def claims(self, outcomes: Outcomes) -> list[Claim]:
        """For each data set, what was claimed for least squares."""
        claims = []
        for dataset in dict.fromkeys(key[0] for key in outcomes):
            part = {label: o for (name, label), o in outcomes.items() if name == dataset}
            for claim in (follows_svrg(part, "HALP fixed16", 2), goes_below(part, 16, 10)):
                claims.append(Claim(f"{dataset}: {claim.claim}", claim.measured, claim.holds))
        return claims

    def draw(self, figure: Any, outcomes: Outcomes) -> None:
        """One panel a data set."""
        names = list(dict.fromkeys(key[0] for key in outcomes))
        for index, dataset in enumerate(names):
            axes = figure.add_subplot(1, len(names), index + 1)
            part = {label: o for (name, label), o in outcomes.items() if name == dataset}
            figures.draw_convergence(axes, part)
            axes.set_title(f"Softmax regression on {dataset}: HALP passes LP-SVRG's floor")


class Formats(Experiment):
    """(f) HALP in several formats, each with and without scale."""

    title = "HALP in several formats, with and without scale"
    file_name = "formats"

    def runs(self) -> dict[Hashable, Run]:
        """By format and whether there is a scale."""
        runs: dict[Hashable, Run] = {}
        names = ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fixed8", "fixed16"]
        for name in ["fixed16"] if self.quick else names:
            rounding = "near" if name in ("fp16", "bf16") else "stoc"
            for scaled in (True, False):
                mu = MU if scaled and name.startswith("fixed") else None
                scale = "auto" if scaled else None
                cycles = (QUICK_CYCLES if scaled else 1) if self.quick else 20
                problem = self.least_squares()
                runs[name, scaled] = Run(problem, "bc-svrg", cycles, name, scale, mu, rounding)
        return runs

    def claims(self, outcomes: Outcomes) -> list[Claim]:
        """What scaling buys."""
        scaled, plain = (
            {name: o.progress for (name, with_scale), o in outcomes.items() if with_scale == wanted}
            for wanted in (True, False)
        )
        claims = [
            Claim(
                "with bit centering's scale HALP converges in every format",
                "‖∇f‖ falls to " + ", ".join(f"{name} {p:.1e}" for name, p in scaled.items()),
                max(scaled.values()) < (1e-2 if self.quick else 1e-6),
            ),
            Claim(
                "fixed point without a scale, in steps of 1, comes no nearer to the optimum",
                "last ‖∇f‖ over first: "
                + ", ".join(f"{name} {p:.1e}" for name, p in plain.items() if "fixed" in name),
                min(p for name, p in plain.items() if "fixed" in name) >= 1,
            ),
        ]
        if ("fp16", False) in outcomes:
            claims.append(self._stall(outcomes["fp16", False], outcomes["fp16", True]))
        return claims

    def _stall(self, plain: Outcome, scaled: Outcome) -> Claim:
        """Whether fp16 stands still once no update reaches half of its smallest subnormal."""
        problem = self.least_squares()
        bound = math.sqrt(problem.features) * 2.0**-25 / problem.lr
        return Claim(
            "fp16 without a scale stalls once its updates underflow: a·max|g̃_j| < 2⁻²⁵, "
            "so that ‖∇f‖ < 2⁻²⁵√d/a",
            f"‖∇f‖ {plain.final:.1e}, where it was a cycle before; 2⁻²⁵√d/a is {bound:.1e}; "
            f"with a scale {scaled.final:.1e}",
            plain.norms[-1] == plain.norms[-2]
            and plain.final < bound
            and scaled.final < plain.final / 10,
        )

    def draw(self, figure: Any, outcomes: Outcomes) -> None:
        """Formats with scale as solid lines, without as dashed ones."""
        axes = figure.add_subplot()
        figures.draw_formats(axes, outcomes)
        axes.set_title("HALP on least squares: with a scale, every format converges")


EXPERIMENTS: dict[str, type[Experiment]] = {
    "a": Solvers,
    "b": Floor,
    "c": Bits,
    "d": Mu,
    "e": SoftmaxRegression,
    "f": Formats,
}


def listed(items: Mapping[Any, Any]) -> str:
    """The keys, with commas."""
    return ", ".join(str(item) for item in items)
