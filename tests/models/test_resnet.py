"""Claims about ResNet-18; torchvision's is the oracle."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from halp.models import ResNet18


def tiny() -> ResNet18:
    torch.manual_seed(0)
    return ResNet18(in_channels=3, n_classes=10, width=4)


def test_it_has_the_known_number_of_parameters():
    assert sum(p.numel() for p in ResNet18(3, 10).parameters()) == 11_173_962


def test_it_maps_images_to_logits():
    model = ResNet18(1, 7, width=2)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("training", [True, False])
def test_it_is_torchvisions_with_another_stem(training):
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model, oracle = ResNet18(3, 10).train(training), resnet18(num_classes=10).train(training)
    oracle.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    oracle.maxpool = nn.Identity()
    oracle.load_state_dict(model.state_dict())
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    for _ in range(2):  # the second time with running statistics that have moved
        ours, theirs = model(images), oracle(images)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    gradients = [
        torch.autograd.grad(cross_entropy(outputs, labels), list(net.parameters()))
        for net, outputs in ((model, ours), (oracle, theirs))
    ]
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in oracle.named_parameters()]
    for name, left, right in zip(names, *gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4, msg=name)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, oracle.state_dict()[name], rtol=1e-4, atol=1e-4)


def test_initial_values_are_spread_as_torchvisions_are():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    ours, theirs = ResNet18(3, 10).state_dict(), resnet18(num_classes=10).state_dict()
    for name in ours.keys() - {"conv1.weight"}:
        if ours[name].is_floating_point():
            torch.testing.assert_close(ours[name].std(), theirs[name].std(), rtol=0.1, atol=0.01)


def test_frozen_features_have_no_gradient_and_stay_in_evaluation_mode():
    model = tiny()
    model.freeze_features()
    model.train()
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["fc.weight", "fc.bias"]
    assert model.training and model.fc.training
    features = [m for m in model.modules() if m not in (model, model.fc)]
    assert not any(module.training for module in features)


def test_frozen_features_do_not_move_their_statistics():
    model = tiny()
    model.freeze_features()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()(torch.randn(4, 3, 32, 32))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_unfrozen_features_train():
    model = tiny()
    before = model.bn1.running_mean.clone()
    model.eval().train()(torch.randn(4, 3, 32, 32))
    assert not torch.equal(model.bn1.running_mean, before)
    assert all(p.requires_grad for p in model.parameters())
