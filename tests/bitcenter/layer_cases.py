"""Delta rules of layers: convolution, normalization, pooling, embedding."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from tests.bitcenter import decimals
from tests.bitcenter.arithmetic_cases import Domain, Rule, normal

ZERO, EPS = decimals.number(0), 1e-5


def _layer(name: str, run: Callable, truth: Callable, *domains: Domain) -> Rule:
    return Rule(name, run, truth, domains, elementwise=False)


# Convolution.


def _padded(x: np.ndarray, width: int) -> np.ndarray:
    spatial = [(width, width)] * (x.ndim - 2)
    return np.pad(x, [(0, 0), (0, 0), *spatial], constant_values=ZERO)


def _convolution(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> np.ndarray:
    """Return what each position of the kernel sees, times its weights."""
    x = _padded(x, padding)
    reach = [dilation * (k - 1) + 1 for k in w.shape[2:]]
    sizes = [(n - r) // stride + 1 for n, r in zip(x.shape[2:], reach, strict=True)]
    out = np.empty((len(x), len(w), *sizes), dtype=object)
    weights = w.reshape(1, groups, len(w) // groups, -1)
    for at in itertools.product(*map(range, sizes)):
        seen = [slice(i * stride, i * stride + r, dilation) for i, r in zip(at, reach, strict=True)]
        patch = x[(slice(None), slice(None), *seen)].reshape(len(x), groups, 1, -1)
        out[(slice(None), slice(None), *at)] = (patch * weights).sum(-1).reshape(len(x), -1)
    return out if b is None else out + b.reshape(-1, *[1] * (out.ndim - 2))


def _transposed(x: np.ndarray, w: np.ndarray, stride: int, padding: int) -> np.ndarray:
    """Return the sum of the kernels that all inputs put down, without the padding."""
    sizes = [(n - 1) * stride + k for n, k in zip(x.shape[2:], w.shape[2:], strict=True)]
    out = np.full((len(x), w.shape[1], *sizes), ZERO, dtype=object)
    for at in itertools.product(*map(range, x.shape[2:])):
        put = [slice(i * stride, i * stride + k) for i, k in zip(at, w.shape[2:], strict=True)]
        values = x[(slice(None), slice(None), *at)]
        out[(slice(None), slice(None), *put)] += np.tensordot(values, w, 1)
    inside = slice(padding, -padding or None)
    return out[(slice(None), slice(None), *[inside] * len(sizes))]


CONVOLUTIONS = [
    _layer("conv2d", F.conv2d, _convolution, normal(2, 3, 5, 4), normal(4, 3, 3, 2), normal(4)),
    _layer(
        "conv2d, strided",
        lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2),
        lambda x, w: _convolution(x, w, stride=2, padding=1, dilation=2),
        normal(2, 3, 5, 6),
        normal(4, 3, 2, 3),
    ),
    _layer(
        "conv1d, groups",
        lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=2),
        lambda x, w, b: _convolution(x, w, b, padding=1, groups=2),
        normal(2, 4, 6),
        normal(6, 2, 3),
        normal(6),
    ),
    _layer("conv3d", F.conv3d, _convolution, normal(1, 2, 3, 3, 2), normal(2, 2, 2, 2, 2)),
    _layer(
        "transposed conv2d",
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
        lambda x, w: _transposed(x, w, 2, 1),
        normal(2, 3, 3, 2),
        normal(3, 2, 3, 3),
    ),
]


# Normalization.


def _standardized(x: np.ndarray, axis: tuple[int, ...]) -> np.ndarray:
    n = np.prod([x.shape[i] for i in axis])
    d = x - x.sum(axis, keepdims=True) / n
    return d / decimals.sqrt((d * d).sum(axis, keepdims=True) / n + decimals.number(EPS))


def _across(channels: np.ndarray) -> np.ndarray:
    return channels.reshape(1, -1, 1, 1)


_MEAN, _VARIANCE = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.5, 1.0, 2.5])


def _with_running_statistics(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    mean, variance = map(decimals.exactly, (_MEAN, _VARIANCE))
    root = decimals.sqrt(variance + decimals.number(EPS))
    return (x - _across(mean)) / _across(root) * _across(w) + _across(b)


def _group_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    grouped = _standardized(x.reshape(2, 2, -1), (2,)).reshape(x.shape)
    return grouped * _across(w) + _across(b)


_IMAGES = normal(3, 3, 2, 2)
NORMALIZATIONS = [
    _layer(
        "batch norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True, eps=EPS),
        lambda x, w, b: _standardized(x, (0, 2, 3)) * _across(w) + _across(b),
        _IMAGES,
        normal(3),
        normal(3),
    ),
    _layer(
        "batch norm of rows",
        lambda x: F.batch_norm(x, None, None, training=True, eps=EPS),
        lambda x: _standardized(x, (0,)),
        normal(7, 1),
    ),
    _layer(
        "batch norm, evaluating",
        lambda x, w, b: F.batch_norm(x, _MEAN.to(x.dtype), _VARIANCE.to(x.dtype), w, b, eps=EPS),
        _with_running_statistics,
        _IMAGES,
        normal(3),
        normal(3),
    ),
    _layer(
        "layer norm",
        lambda x, w, b: F.layer_norm(x, (3, 4), w, b, eps=EPS),
        lambda x, w, b: _standardized(x, (1, 2)) * w + b,
        normal(5, 3, 4),
        normal(3, 4),
        normal(3, 4),
    ),
    _layer(
        "layer norm of a vector",
        lambda x: F.layer_norm(x, (9,), eps=EPS),
        lambda x: _standardized(x, (0,)),
        normal(9),
    ),
    _layer(
        "group norm",
        lambda x, w, b: F.group_norm(x, 2, w, b, eps=EPS),
        _group_norm,
        normal(2, 4, 2, 3),
        normal(4),
        normal(4),
    ),
]


# Pooling.


def _sliding(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> Iterator:
    """Yield the positions of each window, without those on padding."""
    reach = dilation * (kernel - 1) + 1
    for start in range(-padding, size + padding - reach + 1, stride):
        yield [i for i in range(start, start + reach, dilation) if 0 <= i < size]


def _adaptive(size: int, windows: int) -> Iterator:
    for i in range(windows):
        yield range(i * size // windows, -(-(i + 1) * size // windows))


def _pooled(x: np.ndarray, windows: list[list], pool: Callable) -> np.ndarray:
    sizes = list(map(len, windows))
    out = np.empty((*x.shape[: x.ndim - len(windows)], *sizes), dtype=object)
    for at in itertools.product(*map(range, sizes)):
        seen = np.ix_(*map(range, out.shape[:2]), *(w[i] for w, i in zip(windows, at, strict=True)))
        out[(..., *at)] = pool(x[seen].reshape(*out.shape[:2], -1))
    return out


def _largest(x: np.ndarray) -> np.ndarray:
    return x.max(-1)


def _mean(x: np.ndarray) -> np.ndarray:
    return x.sum(-1) / x.shape[-1]


def _pool(name: str, run: Callable, pool: Callable, windows: Callable, *shape: int) -> Rule:
    def truth(x: np.ndarray) -> np.ndarray:
        return _pooled(x, [list(windows(size)) for size in x.shape[2:]], pool)

    return _layer(name, run, truth, normal(*shape))


POOLS = [
    _pool(
        "max-pool",
        lambda x: F.max_pool2d(x, 2),
        _largest,
        lambda n: _sliding(n, 2, 2, 0),
        2,
        3,
        4,
        6,
    ),
    _pool(
        "max-pool, overlapping",
        lambda x: F.max_pool2d(x, 3, 1, 1),
        _largest,
        lambda n: _sliding(n, 3, 1, 1),
        *(2, 1, 4, 5),
    ),
    _pool(
        "max-pool, dilated",
        lambda x: F.max_pool1d(x, 2, 2, 1, 2),
        _largest,
        lambda n: _sliding(n, 2, 2, 1, 2),
        *(2, 3, 9),
    ),
    _pool(
        "max-pool 3d",
        lambda x: F.max_pool3d(x, 2),
        _largest,
        lambda n: _sliding(n, 2, 2, 0),
        *(1, 2, 4, 2, 2),
    ),
    _pool(
        "adaptive max-pool",
        lambda x: F.adaptive_max_pool2d(x, 3),
        _largest,
        lambda n: _adaptive(n, 3),
        *(2, 2, 5, 4),
    ),
    _pool(
        "adaptive max-pool 3d",
        lambda x: F.adaptive_max_pool3d(x, 2),
        _largest,
        lambda n: _adaptive(n, 2),
        *(1, 2, 3, 2, 4),
    ),
    _pool(
        "avg-pool",
        lambda x: F.avg_pool2d(x, 2),
        _mean,
        lambda n: _sliding(n, 2, 2, 0),
        *(2, 3, 4, 6),
    ),
    _pool(
        "avg-pool, padded",
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        _mean,
        lambda n: _sliding(n, 3, 2, 1),
        *(2, 1, 5, 3),
    ),
    _pool(
        "avg-pool 3d",
        lambda x: F.avg_pool3d(x, 2),
        _mean,
        lambda n: _sliding(n, 2, 2, 0),
        *(1, 2, 4, 2, 2),
    ),
    _pool(
        "adaptive avg-pool",
        lambda x: F.adaptive_avg_pool2d(x, 3),
        _mean,
        lambda n: _adaptive(n, 3),
        *(2, 2, 5, 4),
    ),
    _pool(
        "adaptive avg-pool 3d",
        lambda x: F.adaptive_avg_pool3d(x, 2),
        _mean,
        lambda n: _adaptive(n, 2),
        *(1, 2, 3, 2, 4),
    ),
]


# Tables.

_WORDS = torch.tensor([[1, 3, 1], [0, 2, 3]])
TABLES = [
    _layer(
        "embedding", lambda x: F.embedding(_WORDS, x), lambda x: x[_WORDS.numpy()], normal(5, 2)
    ),
]
LAYERS = CONVOLUTIONS + NORMALIZATIONS + POOLS + TABLES
