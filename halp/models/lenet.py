"""LeNet-5, as convolutional networks have been taught since: with ReLU and max-pooling."""

from torch import Tensor, nn


class LeNet(nn.Module):
    """Two convolutions, each with ReLU and max-pooling, and three linear layers.

    LeCun et al., "Gradient-based learning applied to document recognition", 1998, with its layer
    widths: 62,006 parameters for 3 channels and 10 classes.

    Args:
        in_channels: channels of an input image.
        n_classes: number of logits.
    """

    def __init__(self, in_channels: int, n_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, n_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (N, in_channels, 32, 32) to logits of shape (N, n_classes)."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits
