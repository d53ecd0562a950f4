"""ResNet-18 for small images."""

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, around which the input is added (He et al., 2015).

    Args:
        in_channels: channels of its input.
        channels: channels of its output.
        stride: of the first convolution; where it or the channels change the shape, a 1x1
            convolution with batch norm brings the input into it.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, channels, ⌈H/stride⌉, ⌈W/stride⌉)."""
        outputs = self.relu(self.bn1(self.conv1(inputs)))
        outputs = self.bn2(self.conv2(outputs)) + self.downsample(inputs)
        activated: Tensor = self.relu(outputs)
        return activated


class ResNet18(nn.Module):
    """ResNet-18 whose stem keeps the resolution, as images of 32 x 32 pixels need it.

    He et al., "Deep residual learning for image recognition", arXiv 1512.03385. The submodules, and
    hence the keys of the state dict, have torchvision's names; its stem's stride and max-pooling
    are left out. Width 64 with 3 channels and 10 classes has 11,173,962 parameters.

    Args:
        in_channels: channels of an input image.
        n_classes: number of logits.
        width: channels of the first of four stages; each further one has twice as many.
    """

    def __init__(self, in_channels: int, n_classes: int, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.layer1 = _stage(width, width, stride=1)
        self.layer2 = _stage(width, 2 * width, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, stride=2)
        self.layer4 = _stage(4 * width, 8 * width, stride=2)
        self.fc = nn.Linear(8 * width, n_classes)
        self._features_frozen = False
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (N, in_channels, 32, 32) to logits of shape (N, n_classes)."""
        features = self.relu(self.bn1(self.conv1(images)))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        logits: Tensor = self.fc(features.mean((2, 3)))
        return logits

    def freeze_features(self) -> None:
        """Leave only the last layer to train.

        From now on only ``fc`` requires gradients, and all else is in evaluation mode, whatever
        `train` is told: batch norm uses its running statistics and keeps them.
        """
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith("fc."))
        self._features_frozen = True
        self.train(self.training)

    def train(self, mode: bool = True) -> "ResNet18":
        """Set the mode; frozen features stay in evaluation mode."""
        super().train(mode)
        if self._features_frozen:
            for module in self.children():
                module.train(mode and module is self.fc)
        return self


def _stage(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, channels, stride)
    return nn.Sequential(first, BasicBlock(channels, channels, stride=1))
