"""The quantities by which solvers are compared.

Every solver is measured alike: in full precision, with one pass over the data at the current
iterate, so that numbers of different solvers can be subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from halp.bitcenter import materialize
from halp.data import Batches, units
from halp.optim.preserve import generators_of, preserved

Criterion: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and labels of a batch to the mean loss over the labels that count."""


@dataclass(frozen=True)
class Measures:
    """Quantities at one iterate w; f is the mean loss over the training data."""

    train_loss: float  # f(w) + λ/2 ‖w‖²
    grad_norm: float  # norm of the gradient of that
    test_loss: float  # mean loss over the test data, without the λ term
    test_accuracy: float  # in [0, 1]


def measure(
    model: nn.Module,
    train: Batches,
    test: Batches,
    criterion: Criterion,
    *,
    weight_decay: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Measures:
    """Measure on training and test data; see `measure_training` and `measure_test`."""
    train_loss, grad_norm = measure_training(
        model, train, criterion, weight_decay=weight_decay, dtype=dtype
    )
    test_loss, test_accuracy = measure_test(model, test, criterion, dtype=dtype)
    return Measures(train_loss, grad_norm, test_loss, test_accuracy)


def measure_training(
    model: nn.Module,
    batches: Batches,
    criterion: Criterion,
    *,
    weight_decay: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[float, float]:
    """Regularized training loss and the norm of its gradient, over all of ``batches``.

    With n_b labels that count in batch b and f_b its mean loss in train mode, f is
    Σ n_b f_b / Σ n_b; the result is f(w) + λ/2 ‖w‖² and ‖∇f(w) + λw‖ over the parameters that
    require gradients. Model, buffers, ``.grad`` and random state, that of ``batches`` too, are left
    as they were.

    Args:
        model: plain or bit-centered; a bit-centered one is measured at offset + delta.
        batches: the training data.
        criterion: mean loss of outputs and labels.
        weight_decay: λ, applied to every trainable parameter.
        dtype: in which a bit-centered model is measured, by default the model's own; a plain
            model always is in its own. Inputs are cast to it. Sums over batches are float64.
    """
    with _measured(model, batches, dtype):
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradient = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        loss_sum, counted = torch.zeros((), dtype=torch.float64), 0
        for inputs, labels in batches:
            n = units(labels)
            loss = criterion(model(_as_parameters_are(inputs, model)), labels)
            terms = torch.autograd.grad(loss, parameters, allow_unused=True)
            for total, term in zip(gradient, terms, strict=True):
                if term is not None:
                    total.add_(term.double(), alpha=n)
            loss_sum = loss_sum.to(loss.device) + loss.detach().double() * n
            counted += n
        weights = [p.detach().double() for p in parameters]
        penalty = 0.5 * weight_decay * sum(float(w.square().sum()) for w in weights)
        squares = (
            float((total / counted + weight_decay * w).square().sum())
            for total, w in zip(gradient, weights, strict=True)
        )
        return float(loss_sum) / counted + penalty, math.sqrt(sum(squares))


def measure_test(
    model: nn.Module,
    batches: Batches,
    criterion: Criterion,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[float, float]:
    """Mean loss and accuracy over all labels of ``batches`` that count, in evaluation mode.

    Args are those of `measure_training`; outputs are logits of shape (N, n_classes), or
    (N, n_classes, T) for labels of shape (N, T).
    """
    with _measured(model, batches, dtype), torch.no_grad():
        model.eval()
        loss_sum, correct, counted = 0.0, 0, 0
        for inputs, labels in batches:
            outputs = model(_as_parameters_are(inputs, model))
            n = units(labels)
            loss_sum += float(criterion(outputs, labels)) * n
            correct += int((outputs.argmax(1) == labels).sum())  # no class is IGNORED
            counted += n
        return loss_sum / counted, correct / counted


def _as_parameters_are(inputs: Tensor, model: nn.Module) -> Tensor:
    if not inputs.is_floating_point():
        return inputs
    return inputs.to(next(p.dtype for p in model.parameters() if p.is_floating_point()))


@contextmanager
def _measured(model: nn.Module, batches: Batches, dtype: torch.dtype | None) -> Iterator[nn.Module]:
    """Within the block the model is plain; on leaving, everything is as it was.

    That is train/eval modes, buffers and random state.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = preserved(model, generators_of(batches))
    with kept, materialize(model, dtype=dtype):
        try:
            yield model
        finally:
            for module, training in modes:
                module.training = training
