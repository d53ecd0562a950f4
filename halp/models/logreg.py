"""Multinomial logistic (softmax) regression."""

from torch import Tensor, nn


class LogisticRegression(nn.Module):
    """Logits that are an affine function of the flattened input.

    With the cross-entropy loss this is softmax regression, a convex problem.

    Args:
        n_features: numbers in one input after flattening.
        n_classes: number of logits.
    """

    def __init__(self, n_features: int, n_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_features, n_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs of shape (N, ...) to logits of shape (N, n_classes)."""
        logits: Tensor = self.linear(inputs.flatten(1))
        return logits
