"""``state_dict()`` of a bit-centered model: values that alias its parameters, as in PyTorch."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import halp
from halp.bitcenter import BitCenteredTensor


def model_with_deltas(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = halp.bit_center(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    for p in model.parameters():
        p.delta.copy_(halp.quantize(1e-3 * torch.randn(p.shape), "fp16", scale="auto"))
    return model


@pytest.fixture
def model() -> nn.Sequential:
    return model_with_deltas()


def test_an_average_written_into_the_values_is_the_models():
    model, average = model_with_deltas(0), model_with_deltas(1)
    weights, before = halp.value(model[0].weight), halp.value(average[0].weight)
    for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        mean.copy_(0.9 * mean + 0.1 * value)
    assert torch.equal(halp.value(average[0].weight), 0.9 * before + 0.1 * weights)
    assert not average[0].weight.delta.any()


WRITES = {
    "copy_": lambda v: v.copy_(torch.ones_like(v)),
    "fill_": lambda v: v.fill_(1),
    "mul_, add_": lambda v: v.mul_(0).add_(1),
    "lerp_": lambda v: v.lerp_(torch.ones_like(v), 1.0),
    "item assignment": lambda v: v.__setitem__(slice(None), 1.0),
    "in-place operator": lambda v: v.__imul__(0).__iadd__(1),
    "data": lambda v: v.data.fill_(1),
    "detach": lambda v: v.detach().fill_(1),
    "view": lambda v: v.view(-1).fill_(1),
    "rows": lambda v: [row.fill_(1) for row in v],
    "split": lambda v: [part.fill_(1) for part in v.split(1)],
    "out": lambda v: torch.ones(v.shape, out=v),
    "foreach": lambda v: torch._foreach_copy_([v], [torch.ones_like(v)]),
    "initializer": nn.init.ones_,
    "cpu": lambda v: v.cpu().fill_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_every_write_reaches_the_parameter(model, write):
    others = halp.value(model[2].weight)
    with torch.no_grad():
        write(model.state_dict()["0.weight"])
    assert torch.equal(halp.value(model[0].weight), torch.ones(4, 6))
    assert torch.equal(halp.value(model[2].weight), others)


def test_a_write_to_a_part_leaves_the_rest(model):
    expected = halp.value(model[0].weight)
    expected[1, 2:] = 7
    model.state_dict()["0.weight"][1][2:].fill_(7)
    assert torch.equal(halp.value(model[0].weight), expected)


def test_values_show_what_the_parameters_hold_now(model):
    state = model.state_dict()
    value, part = state["0.weight"], state["0.weight"][1]
    with torch.no_grad():
        model[0].weight.delta.add_(1)
    assert torch.equal(value, halp.value(model[0].weight))
    assert torch.equal(part + 0, halp.value(model[0].weight)[1])
    halp.to_plain(model)
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert torch.equal(value, torch.full((4, 6), 3.0))


def test_results_are_plain(model):
    value = model.state_dict()["0.weight"]
    for result in (value + 1, value.clone(), torch.cat([value, value]), value @ value.t()):
        assert type(result) is torch.Tensor
    assert torch.equal(halp.quantize(value, "fp8_e4m3"), halp.quantize(value.clone(), "fp8_e4m3"))


def test_what_nobody_would_see_written_cannot_be(model):
    array = model.state_dict()["0.weight"].numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {
    "torch.save": saved_and_loaded,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deepcopy": copy.deepcopy,
    "clone": lambda state: {name: value.clone() for name, value in state.items()},
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_copies_are_plain_and_stay_what_they_are(model, copied):
    before = halp.value(model[0].weight)
    state = copied(model.state_dict())
    with torch.no_grad():
        model[0].weight.fill_(0)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert torch.equal(state["0.weight"], before)
    model.load_state_dict(state)
    assert torch.equal(halp.value(model[0].weight), before)


def test_a_model_takes_its_own_values_and_another_ones(model):
    before = [halp.value(p) for p in model.parameters()]
    model.load_state_dict(model.state_dict())
    other = model_with_deltas(1)
    other.load_state_dict(model.state_dict())
    plain = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    plain.load_state_dict(model.state_dict())
    for m in (model, other, plain):
        assert all(
            torch.equal(halp.value(p), v) for p, v in zip(m.parameters(), before, strict=True)
        )


def test_with_keep_vars_the_parameters_themselves_are_written(model):
    state = model.state_dict(keep_vars=True)
    assert state["0.weight"] is model[0].weight
    with torch.no_grad():
        state["0.weight"].fill_(2)
    assert torch.equal(halp.value(model[0].weight), torch.full((4, 6), 2.0))


def test_a_write_makes_a_snapshot_due():
    model = halp.bit_center(nn.Linear(4, 2))
    optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.1, T=5)
    optimizer.snapshot([torch.ones(3, 4)], lambda x: model(x).square().mean().backward())
    assert not optimizer.snapshot_due
    model.state_dict()["weight"].mul_(0.5)
    assert optimizer.snapshot_due


def test_an_averaged_model_with_buffers(model):
    average = AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
        assert isinstance(mean, BitCenteredTensor) and torch.equal(halp.value(mean), halp.value(p))


def test_assigning_parameters_is_refused_before_anything_is_assigned(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"leave out assign=True.*halp\.to_plain"):
        model.load_state_dict(state, assign=True)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    halp.to_plain(model).load_state_dict(state, assign=True)
