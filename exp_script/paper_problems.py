"""The problems of ``reproduce_paper.py``: least squares, and softmax regression on images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from halp.data import load_digits, load_mnist
from halp.data.mnist import find_mnist

SAMPLES = 500
"""Rows of every least-squares problem."""


class Problem(ABC):
    """What a solver is given: data, a model and a loss, and settings that all solvers share."""

    seed: int  # of the data, where it is random, and of the order of the samples
    features: int  # numbers in a sample
    batch_size: int  # samples of a step, drawn with replacement
    steps: int  # T: inner steps between two full gradients
    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        """Of the high-precision work."""
        return torch.float64

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate a."""

    @property
    @abstractmethod
    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs of shape (N, d) and N targets, in the problem's dtype."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new float32 model with all parameters 0."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch."""


@dataclass(frozen=True)
class LeastSquares(Problem):
    """``f(w) = ‖Aw − y‖²/2n``; the Hessian's eigenvalues are spread evenly in log from 1 to 1/κ.

    ``A = Q·diag(√(n·ev))·Vᵀ`` with random orthogonal Q and V, ``y = Aw + noise`` with w and the
    noise standard normal. The largest eigenvalue is 1; the constant of strong convexity μ is 1/κ.
    """

    seed: int = 0
    condition: float = 10.0  # κ
    features: int = 20
    batch_size: int = 4
    steps: int = 125
    fixed_lr: float | None = None  # None: half of what a single sample would allow, times the batch

    def __str__(self) -> str:
        return f"least squares of κ {self.condition:g}"

    @property
    def lr(self) -> float:
        """``fixed_lr``, or ``0.5·batch_size/max‖a_i‖²``."""
        if self.fixed_lr is not None:
            return self.fixed_lr
        inputs, _ = self.data
        return 0.5 * self.batch_size / float(inputs.square().sum(1).max())

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """A of shape (500, features), and y."""
        return _least_squares(self.seed, self.condition, self.features)

    def model(self) -> nn.Module:
        """A linear map to one number."""
        return _zeroed(nn.Linear(self.features, 1, bias=False))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Half of the mean squared error."""
        return 0.5 * (outputs.squeeze(1) - targets).square().mean()


def ill_conditioned(seed: int, condition: float) -> LeastSquares:
    """The problem on which the bits that HALP needs are measured.

    With five times as many features, rounding noise, which grows with the trace of the Hessian, is
    above or below the signal by a clear margin; the same 100 steps a cycle suffice for every κ.
    """
    return LeastSquares(seed, condition, features=100, batch_size=16, steps=100, fixed_lr=0.1)


@dataclass(frozen=True)
class Softmax(Problem):
    """Regularized softmax regression on a data set of images."""

    dataset: str  # "digits" or "mnist"
    data_dir: str  # where MNIST lies
    seed: int
    features: int
    batch_size: int
    steps: int
    fixed_lr: float
    weight_decay: float
    momentum: float = 0.0

    def __str__(self) -> str:
        return f"softmax regression on {self.dataset}"

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.fixed_lr

    @property
    def dtype(self) -> torch.dtype:
        """Float32 for MNIST, which ends far above its roundoff and takes half the memory."""
        return torch.float32 if self.dataset == "mnist" else torch.float64

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """Training images as rows, and their labels."""
        inputs, labels = _images(self.dataset, self.data_dir)
        return inputs.to(self.dtype), labels

    def model(self) -> nn.Module:
        """A linear map with bias to ten logits."""
        return _zeroed(nn.Linear(self.features, 10))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        return cross_entropy(outputs, targets)


def digits(seed: int) -> Softmax:
    """The handwritten digits that scikit-learn carries: 1437 samples of 64 pixels."""
    return Softmax("digits", "", seed, 64, 32, 200, fixed_lr=0.6, weight_decay=0.01)


def mnist(seed: int, data_dir: str) -> Softmax:
    """MNIST: 60000 samples of 784 pixels; a cycle is an epoch."""
    return Softmax("mnist", data_dir, seed, 784, 200, 300, 0.05, weight_decay=0.01, momentum=0.9)


def has_mnist(data_dir: str) -> bool:
    """Whether the files of MNIST lie where `load_mnist` looks for them.

    Raises:
        DataError: some of them do.
    """
    return find_mnist(data_dir) is not None


@lru_cache(maxsize=4)
def _least_squares(seed: int, condition: float, features: int) -> tuple[Tensor, Tensor]:
    random = numpy.random.default_rng(seed)
    eigenvalues = numpy.logspace(0, -numpy.log10(condition), features)
    q, _ = numpy.linalg.qr(random.standard_normal((SAMPLES, features)))
    v, _ = numpy.linalg.qr(random.standard_normal((features, features)))
    a = q @ numpy.diag(numpy.sqrt(SAMPLES * eigenvalues)) @ v.T
    w = random.standard_normal(features)
    y = a @ w + random.standard_normal(SAMPLES)
    return torch.from_numpy(a), torch.from_numpy(y)


@lru_cache(maxsize=1)
def _images(dataset: str, data_dir: str) -> tuple[Tensor, Tensor]:
    data = load_mnist(data_dir) if dataset == "mnist" else load_digits()
    return data.train_inputs.flatten(1), data.train_labels


def _zeroed(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        nn.init.zeros_(p)
    return model
