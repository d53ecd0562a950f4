"""What the runner knows: solvers, models and data sets, one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from halp import optim
from halp.data import (
    Dataset,
    as_images,
    load_cifar10,
    load_conll2000,
    load_digits,
    load_mnist,
)
from halp.models import LeNet, LogisticRegression, LSTMTagger, ResNet18

REPOSITORY = Path(__file__).resolve().parents[1]


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


@dataclass(frozen=True)
class ModelEntry:
    """A model of `halp.models` and the data that it takes."""

    build: Callable[..., nn.Module]  # of prepared data, and of what flags of its own say
    prepare: Callable[[Dataset], Dataset] = lambda data: data  # brings data into the model's form
    takes_images: bool = False  # takes --augment
    takes_words: bool = False


MODELS = {
    "logreg": ModelEntry(lambda data: LogisticRegression(data.n_features, data.n_classes)),
    "lenet": ModelEntry(lambda data: LeNet(data.input_shape[0], data.n_classes), as_images, True),
    "lstm": ModelEntry(lambda data: LSTMTagger(data.n_words, data.n_classes), takes_words=True),
    "resnet": ModelEntry(
        lambda data, width: ResNet18(data.input_shape[0], data.n_classes, width), as_images, True
    ),
}

DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": lambda data_dir: load_digits(),
    "mnist": load_mnist,
    "cifar10": load_cifar10,
    "conll2000": lambda data_dir: load_conll2000(data_dir, REPOSITORY / "datasets"),
}

DATASETS_OF_WORDS = ("conll2000",)
"""Those that a model has to take words for; the others hold images."""
