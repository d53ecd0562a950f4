"""Claims about LeNet."""

import torch
from torch import nn
from torch.nn.functional import linear, relu

from halp.models import LeNet


def test_it_has_the_known_number_of_parameters():
    assert sum(p.numel() for p in LeNet(3, 10).parameters()) == 62_006


def test_it_maps_images_to_logits():
    assert LeNet(1, 7)(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


def test_relu_and_pooling_are_modules():
    kinds = [type(module) for module in LeNet(3, 10).modules()]
    assert kinds.count(nn.ReLU) == 4
    assert kinds.count(nn.MaxPool2d) == 2


def test_logits_are_those_of_convolutions_and_maxima_written_out():
    torch.manual_seed(0)
    model = LeNet(3, 10).double()
    conv1, conv2, *dense = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    outputs = images
    for conv in (conv1, conv2):
        patches = outputs.unfold(2, 5, 1).unfold(3, 5, 1)  # (N, C, H, W, 5, 5)
        outputs = torch.einsum("nchwij,ocij->nohw", patches, conv.weight) + conv.bias[:, None, None]
        outputs = relu(outputs).unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))
    outputs = outputs.reshape(2, 400)
    for layer in dense[:-1]:
        outputs = relu(linear(outputs, layer.weight, layer.bias))
    expected = linear(outputs, dense[-1].weight, dense[-1].bias)
    torch.testing.assert_close(model(images), expected)
