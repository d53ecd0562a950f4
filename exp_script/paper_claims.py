"""Claims of ``reproduce_paper.py``, and those that several experiments make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from paper_runs import Outcome

Outcomes: TypeAlias = Mapping[Any, Outcome]


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, or one that follows from it, and what was found."""

    claim: str
    measured: str
    holds: bool


def follows_svrg(outcomes: Outcomes, label: str, factor: float) -> Claim:
    """Whether ‖∇f‖ stays within a factor of SVRG's after every cycle."""
    pairs = zip(outcomes[label].norms, outcomes["SVRG"].norms, strict=False)
    worst = max(halp / svrg for halp, svrg in pairs)
    return Claim(
        "HALP converges linearly at the rate of full-precision SVRG",
        f"{label}: ‖∇f‖ {outcomes[label].final:.1e}, SVRG {outcomes['SVRG'].final:.1e}; "
        f"at most {worst:.2f} times SVRG's after any cycle",
        worst < factor,
    )


def goes_below(outcomes: Outcomes, bits: int, factor: float) -> Claim:
    """Whether HALP ends far below LP-SVRG's floor at the same number of bits."""
    halp, floor = outcomes[f"HALP fixed{bits}"].final, outcomes[f"LP-SVRG fixed{bits}"].floor()
    return Claim(
        f"HALP in {bits} bits passes the floor of LP-SVRG in {bits} bits",
        f"‖∇f‖ {halp:.1e}, LP-SVRG's floor {floor:.1e}",
        halp < floor / factor,
    )
