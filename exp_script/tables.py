"""What the runner knows: solvers, models and data sets, one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from halp import optim
from halp.data import Dataset, load_digits, load_mnist
from halp.models import LogisticRegression


@dataclass(frozen=True)
class SolverEntry:
    """A solver of `halp.optim` and which settings it takes."""

    title: str  # in tables and figures
    optimizer: Callable[..., Any]
    rounds: bool = False  # to a number format: takes --format, --rounding and --scale
    outer_loop: bool = False  # has one, every T steps: takes -T
    bit_centered: bool = False  # trains a bit-centered model

    @property
    def default_scale(self) -> str:
        """Scale of what is rounded: plain IEEE storage unless the solver is bit-centered."""
        return "auto" if self.bit_centered else "none"


SOLVERS = {
    "sgd": SolverEntry("SGD", optim.SGD),
    "lp-sgd": SolverEntry("LP-SGD", optim.LPSGD, rounds=True),
    "svrg": SolverEntry("SVRG", optim.SVRG, outer_loop=True),
    "lp-svrg": SolverEntry("LP-SVRG", optim.LPSVRG, rounds=True, outer_loop=True),
    "bc-sgd": SolverEntry("BC-SGD", optim.BitCenterSGD, True, True, True),
    "bc-svrg": SolverEntry("HALP", optim.BitCenterSVRG, True, True, True),
}

MODELS: dict[str, Callable[[Dataset], nn.Module]] = {
    "logreg": lambda data: LogisticRegression(data.n_features, data.n_classes),
}

DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": lambda data_dir: load_digits(),
    "mnist": load_mnist,
}
