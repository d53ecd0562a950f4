"""Delta rules of losses and of moving elements about, and with those of arithmetic: all of them."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from tests.bitcenter import decimals
from tests.bitcenter.arithmetic_cases import (
    BROADCAST,
    POINTWISE,
    POSITIVE,
    PRODUCTS,
    Rule,
    normal,
    unary,
)
from tests.bitcenter.layer_cases import LAYERS

_LABELS = torch.tensor([0, 3, 1, 3, 2, -100])
_CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0])


def _picked(x: np.ndarray, weight: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """Return weighted negative entries at the labels that count, and the sum of the weights."""
    rows = _LABELS.numpy() >= 0
    columns = _LABELS.numpy()[rows]
    weights = np.ones(4, dtype=object) if weight is None else weight
    return -x[rows, columns] * weights[columns], weights[columns].sum()


def _mean_picked(x: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    picked, total = _picked(x, weight)
    return picked.sum() / total


_PROBABILITIES = torch.tensor([0.0, 1.0, 0.25, 0.75])


def _binary_cross_entropy(x: np.ndarray) -> np.ndarray:
    t, weight = decimals.exactly(_PROBABILITIES), decimals.exactly(_CLASS_WEIGHTS)
    p = decimals.sigmoid(x)
    losses = -weight * (weight * t * decimals.log(p) + (1 - t) * decimals.log(1 - p))
    return losses.sum() / losses.size


LOSSES = [
    Rule("softmax", lambda x: x.softmax(1), lambda x: decimals.softmax(x, 1), (normal(6, 4),)),
    Rule(
        "softmax, dim 0", lambda x: x.softmax(0), lambda x: decimals.softmax(x, 0), (normal(6, 4),)
    ),
    Rule(
        "log-softmax",
        lambda x: x.log_softmax(1),
        lambda x: decimals.log_softmax(x, 1),
        (normal(6, 4),),
    ),
    Rule("nll", lambda x: F.nll_loss(x, _LABELS), _mean_picked, (normal(6, 4),)),
    Rule(
        "nll, weights",
        lambda x: F.nll_loss(x, _LABELS, _CLASS_WEIGHTS.to(x.dtype)),
        lambda x: _mean_picked(x, decimals.exactly(_CLASS_WEIGHTS)),
        (normal(6, 4),),
    ),
    Rule(
        "nll, sum",
        lambda x: F.nll_loss(x, _LABELS, reduction="sum"),
        lambda x: _picked(x)[0].sum(),
        (normal(6, 4),),
    ),
    Rule(
        "nll of images",
        lambda x: F.nll_loss(x.view(2, 4, 3, 1), _LABELS.view(2, 3, 1)),
        lambda x: _mean_picked(x.reshape(2, 4, 3).transpose(0, 2, 1).reshape(6, 4)),
        (normal(6, 4),),
    ),
    Rule(
        "cross-entropy",
        lambda x: F.cross_entropy(x, _LABELS),
        lambda x: _mean_picked(decimals.log_softmax(x, 1)),
        (normal(6, 4),),
    ),
    Rule(
        "binary cross-entropy",
        lambda x: F.binary_cross_entropy_with_logits(
            x,
            _PROBABILITIES.to(x.dtype).expand(6, 4),
            _CLASS_WEIGHTS.to(x.dtype),
            pos_weight=_CLASS_WEIGHTS.to(x.dtype),
        ),
        _binary_cross_entropy,
        (normal(6, 4),),
    ),
    Rule("squares, mean", F.mse_loss, lambda x, y: ((x - y) ** 2).sum() / 24, (normal(6, 4),) * 2),
    Rule(
        "squares, sum",
        lambda x, y: F.mse_loss(x, y, reduction="sum"),
        lambda x, y: ((x - y) ** 2).sum(),
        (normal(6, 4),) * 2,
    ),
]
LOSSES = [rule._replace(elementwise=False) for rule in LOSSES]

_ROWS = torch.tensor([2, 0, 2])
_PICKS = torch.tensor([[0, 2], [1, 3], [3, 0]])


def _index_add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x = x.copy()
    np.add.at(x, _ROWS.numpy(), 2 * y)
    return x


def _scatter_add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x = x.copy()
    np.add.at(x, (np.arange(3)[:, None], _PICKS.numpy()), y)
    return x


def _scatter(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x = x.copy()
    np.put_along_axis(x, _PICKS.numpy(), y, 1)
    return x


def _moved(name: str, run: Callable, truth: Callable, *, differentiable: bool = True) -> Rule:
    return Rule(name, run, truth, (normal(3, 4),), False, differentiable=differentiable)


MOVES = [
    _moved("sum", torch.sum, np.sum),
    _moved("sum, dims", lambda x: x.sum((0, 1), keepdim=True), lambda x: x.sum(keepdims=True)),
    _moved("mean", torch.mean, lambda x: x.sum() / 12),
    _moved("mean, dim", lambda x: x.mean(-1), lambda x: x.sum(-1) / 4),
    _moved("cumsum", lambda x: x.cumsum(1), lambda x: x.cumsum(1)),
    _moved("trace", torch.trace, lambda x: x.diagonal().sum(), differentiable=False),
    _moved("pad", lambda x: F.pad(x, (1, 2)), lambda x: np.pad(x, ((0, 0), (1, 2)))),
    _moved(
        "pad, value", lambda x: F.pad(x, (1, 2), value=5.0), lambda x: np.pad(x, ((0, 0), (1, 2)))
    ),
    _moved("flip", lambda x: x.flip(1), lambda x: np.flip(x, 1)),
    _moved("roll", lambda x: x.roll(1, 0), lambda x: np.roll(x, 1, 0)),
    _moved("repeat", lambda x: x.repeat(2, 3), lambda x: np.tile(x, (2, 3))),
    _moved("tril", torch.tril, np.tril),
    _moved("triu", lambda x: x.triu(1), lambda x: np.triu(x, 1)),
    _moved(
        "gather", lambda x: x.gather(1, _PICKS), lambda x: np.take_along_axis(x, _PICKS.numpy(), 1)
    ),
    _moved("index_select", lambda x: x.index_select(0, _ROWS), lambda x: x[_ROWS.numpy()]),
    _moved("index", lambda x: x[_ROWS], lambda x: x[_ROWS.numpy()], differentiable=False),
    _moved(
        "index, mask", lambda x: x[_ROWS > 0], lambda x: x[_ROWS.numpy() > 0], differentiable=False
    ),
    _moved(
        "index, pairs",
        lambda x: x[_ROWS, _ROWS + 1],
        lambda x: x[_ROWS.numpy(), _ROWS.numpy() + 1],
        differentiable=False,
    ),
    _moved(
        "scatter, value",
        lambda x: x.scatter(1, _PICKS, 2.0),
        lambda x: _scatter(x, np.full((3, 2), decimals.number(2))),
    ),
    _moved("select", lambda x: x[1], lambda x: x[1]),
    _moved("slice", lambda x: x[1:, ::2], lambda x: x[1:, ::2]),
    _moved("transposes", lambda x: x.t().unsqueeze(0).flatten(), lambda x: x.T.flatten()),
    _moved(
        "as_strided",
        lambda x: x.as_strided((2, 3), (1, 2)),
        lambda x: np.stack([x.flatten()[i : i + 5 : 2] for i in (0, 1)]),
    ),
    _moved("expand", lambda x: x.expand(2, 3, 4).sum(0), lambda x: 2 * x),
    _moved("diagonal", lambda x: x.diagonal(1), lambda x: x.diagonal(1)),
    _moved("split", lambda x: x.split([1, 3], 1)[1], lambda x: x[:, 1:]),
    _moved("chunk", lambda x: x.chunk(2, 1)[1], lambda x: x[:, 2:]),
    _moved("unbind", lambda x: x.unbind(1)[2], lambda x: x[:, 2]),
    _moved(
        "where",
        lambda x: torch.where(_PICKS[:, :1] > 0, x, 2.0),
        lambda x: np.where(_PICKS[:, :1].numpy() > 0, x, decimals.number(2)),
    ),
    _moved(
        "masked_fill",
        lambda x: x.masked_fill(_PICKS[:, :1] > 0, 2.0),
        lambda x: np.where(_PICKS[:, :1].numpy() > 0, decimals.number(2), x),
    ),
]
_TWO = (normal(3, 4), normal(3, 4))
MOVES += [
    Rule(
        "cat",
        lambda x, y: torch.cat([x, torch.ones(1, 4, dtype=x.dtype), y]),
        lambda x, y: np.concatenate([x, x[:1] * 0, y]),
        _TWO,
        False,
    ),
    Rule(
        "stack", lambda x, y: torch.stack([x, y], 1), lambda x, y: np.stack([x, y], 1), _TWO, False
    ),
    Rule("index_add", lambda x, y: x.index_add(0, _ROWS, y, alpha=2), _index_add, _TWO, False),
    Rule(
        "index_put",
        lambda x, y: x.index_put((_ROWS,), 2 * y, accumulate=True),
        _index_add,
        _TWO,
        False,
    ),
    Rule(
        "scatter_add",
        lambda x, y: x.scatter_add(1, _PICKS, y),
        _scatter_add,
        (normal(3, 4), normal(3, 2)),
        False,
    ),
    Rule(
        "scatter",
        lambda x, y: x.scatter(1, _PICKS, y),
        _scatter,
        (normal(3, 4), normal(3, 2)),
        False,
    ),
    Rule(
        "where of two",
        lambda x, y: torch.where(_PICKS[:, :1] > 0, x, y),
        lambda x, y: np.where(_PICKS[:, :1].numpy() > 0, x, y),
        _TWO,
        False,
    ),
    Rule(
        "masked_fill, tensor",
        lambda x, y: x.masked_fill(_PICKS[:, :1] > 0, y),
        lambda x, y: np.where(_PICKS[:, :1].numpy() > 0, y, x),
        (normal(3, 4), normal()),
        False,
    ),
]


def _huber(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    r = abs(x - y)
    return np.where(r < 1, r * r / 2, r - decimals.number(0.5)).sum() / r.size


#: No rules of their own: PyTorch defines them by operations that have.
DECOMPOSED = [
    unary(
        "mish",
        F.mish,
        lambda x: x * decimals.tanh(decimals.softplus(x)),
        elementwise=False,
    ),
    unary("elu", F.elu, lambda x: np.where(x > 0, x, decimals.exp(x) - 1), elementwise=False),
    unary("softsign", F.softsign, lambda x: x / (1 + abs(x)), elementwise=False),
    unary(
        "log-sigmoid",
        F.logsigmoid,
        lambda x: -decimals.softplus(-x, threshold=100),
        elementwise=False,
    ),
    unary("tanhshrink", F.tanhshrink, lambda x: x - decimals.tanh(x), elementwise=False),
    Rule(
        "addcmul",
        lambda x, y: torch.addcmul(x, y, y, value=0.5),
        lambda x, y: x + y * y / 2,
        _TWO,
        False,
    ),
    Rule(
        "addcdiv",
        lambda x, y: torch.addcdiv(x, x, y, value=0.5),
        lambda x, y: x + x / y / 2,
        (POSITIVE, POSITIVE),
        False,
    ),
    Rule("lerp", lambda x, y: torch.lerp(x, y, 0.25), lambda x, y: x + (y - x) / 4, _TWO, False),
    Rule("einsum", lambda x, y: torch.einsum("ij,kj->ik", x, y), lambda x, y: x @ y.T, _TWO, False),
    Rule("huber", F.huber_loss, _huber, _TWO, False),
    _moved(
        "cat, integers",
        lambda x: torch.cat([x, torch.arange(4).view(1, 4)]),
        lambda x: np.concatenate([x, 0 * x[:1]]),
    ),
    _moved(
        "cat, booleans",
        lambda x: torch.cat([torch.ones(1, 4, dtype=torch.bool), x]),
        lambda x: np.concatenate([0 * x[:1], x]),
    ),
    _moved(
        "stack, integers",
        lambda x: torch.stack([torch.arange(12).view(3, 4), x]),
        lambda x: np.stack([0 * x, x]),
    ),
    _moved(
        "add, integers", lambda x: x + torch.arange(24).view(2, 3, 4), lambda x: np.stack([x, x])
    ),
    _moved(
        "sub, integers", lambda x: torch.arange(24).view(2, 3, 4) - x, lambda x: -np.stack([x, x])
    ),
    _moved(
        "mul, integers",
        lambda x: torch.arange(12).view(3, 4) * x,
        lambda x: np.arange(12).reshape(3, 4) * x,
    ),
    _moved(
        "pad, circular",
        lambda x: F.pad(x, (1, 2), mode="circular"),
        lambda x: np.pad(x, ((0, 0), (1, 2)), mode="wrap"),
    ),
    _moved(
        "pad, reflect",
        lambda x: F.pad(x, (1, 2), mode="reflect"),
        lambda x: np.pad(x, ((0, 0), (1, 2)), mode="reflect"),
        differentiable=False,
    ),
]
RULES = POINTWISE + BROADCAST + PRODUCTS + LOSSES + MOVES + LAYERS
