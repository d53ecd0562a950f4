"""One table of model cases: a model, its data, its loss and a seed, of the sizes that users have.

Tests take what they need of it: :data:`SMOOTH`, :data:`RELU`, :data:`VARIATIONS`, :data:`DROPOUT`,
or all of them in :data:`CASES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from halp.data import IGNORED
from halp.models import LeNet, LSTMTagger, ResNet18

FEATURES, CLASSES = 64, 10
BATCH, STEPS_IN_SEQUENCE = 64, 8
WORDS, LONGEST_SENTENCE = 50, 10


@dataclass(frozen=True)
class Case:
    """What a test trains or differentiates."""

    name: str
    #: Makes a new model, its weights drawn from the global generator.
    build: Callable[[], nn.Module]
    #: Draws a batch of n inputs, and its targets.
    inputs: Callable[[int, Generator], Tensor]
    targets: Callable[[int, Generator], Tensor]
    #: Mean loss (or what stands for it) from outputs and targets.
    loss: Callable[[Tensor, Tensor], Tensor]
    seed: int = 0
    batch_size: int = BATCH

    def __str__(self) -> str:
        return self.name

    def model(self, seed: int | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return a new model: float32 weights drawn with the seed, then converted."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed if seed is None else seed)
            return self.build().to(dtype)

    def batches(
        self,
        count: int = 1,
        size: int | None = None,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return batches of float32 values drawn with the seed, then converted; integers stay."""
        generator = Generator().manual_seed(1000 + (self.seed if seed is None else seed))
        drawn = []
        for _ in range(count):
            x = self.inputs(size or self.batch_size, generator)
            y = self.targets(len(x), generator)
            drawn.append(tuple(t.to(dtype) if t.is_floating_point() else t for t in (x, y)))
        return drawn

    def loss_of(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(model(x), y)


# Models.


def logistic_regression() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def mlp(activation: Callable[[], nn.Module], *, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 128, bias=bias),
        activation(),
        nn.Linear(128, 64, bias=bias),
        activation(),
        nn.Linear(64, CLASSES, bias=bias),
    )


def dropout_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 128),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(128, 64),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(64, CLASSES),
    )


class TiedAutoencoder(nn.Module):
    """Decodes with the transpose of the weights that it encodes with."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, 32)
        self.decoder_bias = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(x))
        return F.linear(hidden, self.encoder.weight.t(), self.decoder_bias)


class TwiceTheSameLayer(nn.Module):
    """Registers one parameter under two names, as language models tie embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def batch_norm_net() -> nn.Module:
    """Convolutions without bias, since batch normalization takes any constant away."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 16, 32, bias=False),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    )


# Data.


def words(n: int, generator: Generator) -> Tensor:
    return torch.randint(WORDS, (n, LONGEST_SENTENCE), generator=generator)


def tags(n: int, generator: Generator) -> Tensor:
    """Return tags of sentences of 1 to LONGEST_SENTENCE words, padded."""
    y = torch.randint(12, (n, LONGEST_SENTENCE), generator=generator)
    lengths = torch.randint(1, LONGEST_SENTENCE + 1, (n, 1), generator=generator)
    return y.masked_fill(torch.arange(LONGEST_SENTENCE) >= lengths, IGNORED)


def normal(*shape: int, scale: float = 1.0) -> Callable[[int, Generator], Tensor]:
    return lambda n, generator: scale * torch.randn(n, *shape, generator=generator)


def labels(*shape: int) -> Callable[[int, Generator], Tensor]:
    return lambda n, generator: torch.randint(CLASSES, (n, *shape), generator=generator)


def some_labels_ignored(n: int, generator: Generator) -> Tensor:
    """Return labels of which about a third is −100, but never the first."""
    y = labels()(n, generator)
    ignored = torch.rand(n, generator=generator) < 1 / 3
    ignored[0] = False
    return y.masked_fill(ignored, -100)


def probabilities(n: int, generator: Generator) -> Tensor:
    return torch.softmax(torch.randn(n, CLASSES, generator=generator), dim=1)


# Losses.


def weighted_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.25, 3.0, CLASSES).to(logits.dtype)
    return F.cross_entropy(logits, y, weight=weight)


def confident_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of rows in which nearly all of the probability is one class's."""
    return F.cross_entropy(30 * logits, y)


def smoothed_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, label_smoothing=0.1)


def summed_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def separate_cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropies of samples, weighted by hand."""
    weight = torch.linspace(0.5, 2.0, len(y)).to(logits.dtype)
    return (weight * F.cross_entropy(logits, y, reduction="none")).mean()


def separate_squares(outputs: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, len(y)).to(outputs.dtype).unsqueeze(1)
    return (weight * F.mse_loss(outputs, y, reduction="none")).mean()


def sequence_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of (n, time, classes) against (n, time)."""
    return F.cross_entropy(logits.transpose(1, 2), y)


# The table.

SMOOTH_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}


def _both_losses(name: str, build: Callable[[], nn.Module]) -> list[Case]:
    cross_entropy = Case(
        f"{name}/cross-entropy", build, normal(FEATURES), labels(), F.cross_entropy
    )
    mean_squared = replace(
        cross_entropy, name=f"{name}/mean-squared", targets=normal(CLASSES), loss=F.mse_loss
    )
    return [cross_entropy, mean_squared]


def _mlp_of(activation: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: mlp(activation)


LOGISTIC = _both_losses("logreg", logistic_regression)
MLPS = [
    case
    for name, activation in SMOOTH_ACTIVATIONS.items()
    for case in _both_losses(name, _mlp_of(activation))
]
#: Design section 6, row 3.
SMOOTH = LOGISTIC + MLPS
#: Design section 6, row 4.
RELU = _both_losses("relu", _mlp_of(nn.ReLU))

_tanh, _squares = (
    replace(case, build=_mlp_of(nn.Tanh)) for case in _both_losses("tanh", logistic_regression)
)
_sequences = {
    "inputs": normal(STEPS_IN_SEQUENCE, FEATURES),
    "targets": labels(STEPS_IN_SEQUENCE),
    "loss": sequence_cross_entropy,
}
#: The smooth models under every other circumstance.
VARIATIONS = [
    replace(_tanh, name="confident", loss=confident_cross_entropy),
    replace(LOGISTIC[0], name="confident-logreg", loss=confident_cross_entropy),
    replace(_tanh, name="saturated-tanh", inputs=normal(FEATURES, scale=10)),
    replace(
        _tanh,
        name="saturated-sigmoid",
        build=_mlp_of(nn.Sigmoid),
        inputs=normal(FEATURES, scale=10),
    ),
    replace(_tanh, name="label-smoothing", loss=smoothed_cross_entropy),
    replace(_tanh, name="class-weights", loss=weighted_cross_entropy),
    replace(_tanh, name="ignored-labels", targets=some_labels_ignored),
    replace(_tanh, name="probability-targets", targets=probabilities),
    replace(_tanh, name="summed", loss=summed_cross_entropy),
    replace(_tanh, name="separate", loss=separate_cross_entropies),
    replace(_squares, name="separate-squares", loss=separate_squares),
    replace(_tanh, name="batch-of-one", batch_size=1),
    replace(_tanh, name="sequences", **_sequences),
    replace(_tanh, name="no-bias", build=lambda: mlp(nn.Tanh, bias=False)),
    replace(_tanh, name="no-bias-sequences", build=lambda: mlp(nn.Tanh, bias=False), **_sequences),
    replace(_tanh, name="tied-layers", build=TwiceTheSameLayer),
    replace(_squares, name="tied-transpose", build=TiedAutoencoder, targets=normal(FEATURES)),
]
DROPOUT = _both_losses("dropout", dropout_mlp)

_images = Case(
    "", lambda: LeNet(3, CLASSES), normal(3, 32, 32), labels(), F.cross_entropy, batch_size=16
)
LENET = replace(_images, name="lenet")
BATCH_NORM_NET = replace(
    _images, name="batch-norm", build=batch_norm_net, inputs=normal(3, 16, 16), batch_size=32
)
RESNET = replace(_images, name="resnet", build=lambda: ResNet18(3, CLASSES, width=16))
TAGGER = Case("lstm", lambda: LSTMTagger(WORDS, 12), words, tags, F.cross_entropy, batch_size=16)
#: The experiments' models, and a small net with batch normalization.
NETS = [LENET, TAGGER, BATCH_NORM_NET, RESNET]
CASES = SMOOTH + RELU + VARIATIONS + DROPOUT + NETS


def by_name(cases: list[Case]) -> pytest.MarkDecorator:
    """Parametrize a test by cases; those of the largest model are slow ones."""
    params = [
        pytest.param(case, marks=[pytest.mark.slow] if case is RESNET else []) for case in cases
    ]
    return pytest.mark.parametrize("case", params, ids=str)
