"""Claims about softmax regression."""

import torch
from torch import nn

from halp.models import LogisticRegression


def test_logits_are_an_affine_function_of_the_flattened_input():
    torch.manual_seed(0)
    model = LogisticRegression(n_features=6, n_classes=4)
    inputs = torch.randn(5, 1, 2, 3)
    weight, bias = model.linear.weight.detach(), model.linear.bias.detach()
    expected = inputs.reshape(5, 6).numpy() @ weight.numpy().T + bias.numpy()
    torch.testing.assert_close(model(inputs).detach(), torch.from_numpy(expected))


def test_the_only_parameters_are_one_linear_layers_with_its_usual_initial_values():
    torch.manual_seed(0)
    model = LogisticRegression(6, 4)
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    assert [name for name, _ in model.named_parameters()] == ["linear.weight", "linear.bias"]
    assert torch.equal(model.linear.weight, layer.weight)
    assert torch.equal(model.linear.bias, layer.bias)
