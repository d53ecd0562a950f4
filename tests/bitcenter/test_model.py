"""A bit-centered model is still a model: copying, saving, moving, evaluating, printing."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import halp
from halp.bitcenter import BitCenteredTensor, is_bit_centered


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def bit_centered_model(**options) -> nn.Module:
    """A model with deltas of about 1e-3."""
    model = halp.bit_center(plain_model(), **options)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        noise = 1e-3 * torch.randn(p.shape, generator=generator)
        p.delta.copy_(halp.quantize(noise, "fp16", scale="auto"))
    return model


@pytest.fixture
def model() -> nn.Module:
    return bit_centered_model()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def y() -> torch.Tensor:
    return torch.randint(0, 3, (10,), generator=torch.Generator().manual_seed(3))


def values(model: nn.Module) -> list[torch.Tensor]:
    return [halp.value(p) for p in model.parameters()]


def test_parameters_keep_their_identity_and_start_at_their_value():
    model = plain_model()
    before = [(p, p.detach().clone()) for p in model.parameters()]
    assert halp.bit_center(model) is model
    for (p, start), (name, q) in zip(before, model.named_parameters(), strict=True):
        assert p is q and isinstance(p, nn.Parameter) and isinstance(p, BitCenteredTensor), name
        assert torch.equal(p.offset, start) and not p.delta.any()
        assert p.is_leaf and p.requires_grad


def test_value_is_offset_plus_delta(model):
    weight = model[0].weight
    assert torch.equal(halp.value(weight), weight.offset + weight.delta)
    plain = torch.ones(2, requires_grad=True)
    assert torch.equal(halp.value(plain), plain) and not halp.value(plain).requires_grad


def test_deepcopy_is_independent_and_keeps_both_parts(model, x, y):
    F.cross_entropy(model(x), y).backward()
    twin = copy.deepcopy(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert q is not p and isinstance(q, nn.Parameter) and q.requires_grad
        assert torch.equal(p.offset, q.offset) and torch.equal(p.delta, q.delta)
        assert torch.equal(p.grad.delta, q.grad.delta) and q.grad is not p.grad
        assert q.context is not p.context
    assert len({id(p.context) for p in twin.parameters()}) == 1
    twin[0].weight.data.mul_(2)
    assert not torch.equal(model[0].weight.offset, twin[0].weight.offset)
    twin(x)


def test_double_and_float_convert_both_parts(model, x, y):
    before, parameters = values(model), list(model.parameters())
    model.double()
    for p, q, start in zip(parameters, model.parameters(), before, strict=True):
        assert p is q and p.dtype == p.offset.dtype == p.delta.dtype == torch.float64
        assert torch.allclose(halp.value(p), start.double(), rtol=1e-6, atol=0)
    F.cross_entropy(model(x.double()), y).backward()
    assert model[0].weight.grad.dtype == torch.float64
    model.float()
    assert all(torch.equal(v, start) for v, start in zip(values(model), before, strict=True))
    model(x)


@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.cpu()])
def test_moving_to_a_device_keeps_both_parts(model, move):
    parts = [(p.offset.clone(), p.delta.clone()) for p in model.parameters()]
    move(model)
    for p, (offset, delta) in zip(model.parameters(), parts, strict=True):
        assert torch.equal(p.offset, offset) and torch.equal(p.delta, delta)


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_half_is_refused_and_loses_nothing(model, x, convert):
    before = values(model)
    with pytest.raises(RuntimeError, match=r"cannot be converted.*halp\.to_plain"):
        convert(model)
    assert all(torch.equal(v, start) for v, start in zip(values(model), before, strict=True))
    model(x)


def test_state_dict_is_plain_and_loads_into_a_plain_model(model):
    state = model.state_dict()
    assert not any(isinstance(v, BitCenteredTensor) for v in state.values())
    assert list(state) == list(plain_model().state_dict())
    plain = plain_model()
    plain.load_state_dict(state)
    assert torch.equal(plain[0].weight, halp.value(model[0].weight))
    assert torch.equal(model[0].state_dict()["weight"], halp.value(model[0].weight))
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


def test_state_dict_survives_a_file_read_with_weights_only(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = bit_centered_model()
    other.load_state_dict(torch.load(file, weights_only=True))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(q.offset, halp.value(p)) and not q.delta.any()


def test_state_dict_keeps_float64_offsets():
    model = bit_centered_model(offset_dtype=torch.float64)
    assert model.state_dict()["0.weight"].dtype == torch.float64


def test_a_whole_model_survives_torch_save(model, x):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.offset, q.offset) and torch.equal(p.delta, q.delta)
    assert len({id(p.context) for p in other.parameters()}) == 1
    assert torch.equal(halp.value(other.eval()(x)), halp.value(model.eval()(x)))
    assert torch.equal(other.state_dict()["0.weight"], halp.value(model[0].weight))


def test_data_writes_through_to_both_parts(model):
    weight = model[0].weight
    offset, delta = weight.offset.clone(), weight.delta.clone()
    weight.data.mul_(2)
    assert torch.equal(weight.offset, 2 * offset) and torch.equal(weight.delta, 2 * delta)


def test_assigning_data_is_refused_and_loses_nothing(model):
    before = halp.value(model[0].weight)
    with pytest.raises(RuntimeError, match=r"p\.data\.copy_"):
        model[0].weight.data = torch.zeros(8, 6)
    assert torch.equal(halp.value(model[0].weight), before)


def test_two_backward_passes_accumulate_both_parts(model, x, y):
    model.eval()
    F.cross_entropy(model(x), y).backward()
    once = [(p.grad.offset.clone(), p.grad.delta.clone()) for p in model.parameters()]
    F.cross_entropy(model(x), y).backward()
    for p, (offset, delta) in zip(model.parameters(), once, strict=True):
        assert torch.equal(p.grad.offset, 2 * offset) and torch.equal(p.grad.delta, 2 * delta)


def test_evaluation_is_the_same_in_every_grad_mode(model, x, y):
    model.eval()
    reference = halp.value(model(x))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = model(x)
            assert torch.equal(halp.value(out), reference)
            accuracy = (out.argmax(1) == y).float().mean().item()
        assert accuracy == (reference.argmax(1) == y).float().mean().item()
    F.cross_entropy(model(x), y).backward()


def test_outputs_are_the_plain_models_outputs(model, x):
    plain = copy.deepcopy(plain_model()).double().eval()
    plain.load_state_dict(model.state_dict())
    model.eval()
    assert torch.allclose(halp.value(model(x)).double(), plain(x.double()), atol=1e-5)


def test_printing_says_what_it_is(model, x, y):
    loss = F.cross_entropy(model(x), y)
    value = halp.value(loss).item()
    assert loss.item() == value and loss.tolist() == value
    assert float(loss.detach()) == value
    assert f"{loss:.3f}" == f"{value:.3f}"
    assert loss.detach().numpy() == value
    assert "Linear(in_features=6, out_features=8" in str(model)
    text = repr(model[3].bias)
    assert "offset=tensor(" in text and "delta=tensor(" in text and "fp16" in text
    with pytest.raises(RuntimeError, match="requires grad"):
        loss.numpy()


def test_materialize_shows_plain_values_and_gives_everything_back(model, x, y):
    F.cross_entropy(model(x), y).backward()
    parameters = list(model.parameters())
    before, gradients = values(model), [p.grad for p in parameters]
    parts = [(p.offset, p.delta.clone()) for p in parameters]
    with halp.materialize(model) as same:
        assert same is model
        assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
        for p, v in zip(parameters, before, strict=True):
            assert type(p) is nn.Parameter and torch.equal(p, v) and p.grad is None
        with halp.materialize(model):
            F.cross_entropy(model(x), y).backward()
        assert type(parameters[0].grad) is torch.Tensor
    for p, q, (offset, delta), g in zip(
        parameters, model.parameters(), parts, gradients, strict=True
    ):
        assert p is q and isinstance(p, BitCenteredTensor)
        assert p.offset is offset and torch.equal(p.delta, delta) and p.grad is g
    F.cross_entropy(model(x), y).backward()


def test_materialize_gives_everything_back_after_an_error(model):
    with pytest.raises(KeyError), halp.materialize(model):
        raise KeyError
    assert is_bit_centered(model)


def test_writing_inside_materialize_sets_the_center(model):
    before, untouched = halp.value(model[0].weight), model[3].weight.delta.clone()
    with halp.materialize(model), torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(model[0].weight.offset, 2 * before) and not model[0].weight.delta.any()
    assert torch.equal(model[3].weight.delta, untouched)


def test_materialize_is_in_the_models_own_dtype_unless_told(x):
    model = bit_centered_model(offset_dtype=torch.float64)
    assert model[0].weight.offset.dtype == torch.float64
    assert model[0].weight.delta.dtype == torch.float32
    with halp.materialize(model):
        assert model(x).dtype == torch.float32
    with halp.materialize(model, dtype=torch.float64):
        assert torch.equal(model[0].weight, halp.value(model[0].weight))
        model(x.double())


def test_materialize_leaves_a_plain_model_alone(x):
    model = plain_model()
    with halp.materialize(model):
        model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_to_plain_is_for_good_and_can_be_undone(model, x, y):
    before, parameters = values(model), list(model.parameters())
    assert halp.to_plain(model) is model and not is_bit_centered(model)
    for p, q, v in zip(parameters, model.parameters(), before, strict=True):
        assert p is q and type(p) is nn.Parameter and torch.equal(p, v)
    F.cross_entropy(model(x), y).backward()
    halp.bit_center(model)
    assert not isinstance(model.state_dict()["0.weight"], BitCenteredTensor)
    F.cross_entropy(model(x), y).backward()


def test_a_gradient_from_before_counts_in_full(x, y):
    model = nn.Linear(6, 3)
    F.cross_entropy(model(x), y).backward()
    gradient = model.weight.grad.clone()
    halp.bit_center(model)
    assert torch.equal(halp.value(model.weight.grad), gradient)
    F.cross_entropy(model(x), y).backward()
    assert torch.allclose(halp.value(model.weight.grad), 2 * gradient)


def test_tied_weights_stay_tied_through_everything():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    model = halp.bit_center(Tied())
    model(torch.ones(2, 6)).square().mean().backward()
    with halp.materialize(model):
        assert model.first.weight is model.second.weight
    assert model.first.weight is model.second.weight
    assert len(list(model.parameters())) == 3
    assert copy.deepcopy(model).first.weight is not model.first.weight
    twin = copy.deepcopy(model)
    assert twin.first.weight is twin.second.weight


def test_an_lstm_keeps_its_flat_weights():
    model = halp.bit_center(nn.LSTM(4, 5))
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))
    with halp.materialize(model):
        model(torch.ones(3, 2, 4))
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))


def test_initializers_set_the_center(model):
    nn.init.xavier_uniform_(model[0].weight)
    nn.init.constant_(model[3].bias, 2.0)
    assert not model[0].weight.delta.any() and not model[3].bias.delta.any()
    assert (model[3].bias.offset == 2).all()


def test_a_frozen_layer_gets_no_gradient(model, x, y):
    model[0].requires_grad_(False)
    F.cross_entropy(model(x), y).backward()
    assert model[0].weight.grad is None and model[3].weight.grad is not None


def test_a_torch_optimizer_moves_the_full_value(model, x, y):
    reference = plain_model().eval()
    reference.load_state_dict(model.state_dict())
    model.eval()
    for m in (model, reference):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(m(x), y).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(halp.value(p), q, atol=1e-5)


def test_a_plain_tensor_never_swallows_a_delta(model, x):
    out = model.eval()(x).detach()
    for swallow in (lambda b: b.copy_(out), lambda b: b.add_(out)):
        buffer = torch.zeros(10, 3)
        with pytest.raises(RuntimeError, match=r"lose its delta.*halp\.value"):
            swallow(buffer)
        assert not buffer.any()


@pytest.mark.parametrize(
    ("build", "options", "error", "words"),
    [
        (plain_model, {"format": "fp17"}, ValueError, "unknown format 'fp17'.*fp16"),
        (plain_model, {"rounding": "up-ish"}, ValueError, "unknown rounding 'up-ish'.*near"),
        (plain_model, {"scale": -1.0}, ValueError, "scale must be .*not -1.0"),
        (plain_model, {"offsets": "cashed"}, ValueError, "on-site"),
        (plain_model, {"arithmetic": "native"}, ValueError, "emulated"),
        (plain_model, {"offset_dtype": torch.float16}, ValueError, "float64, not torch.float16"),
        (lambda: plain_model().half(), {}, TypeError, "'0.weight' is torch.float16"),
        (bit_centered_model, {}, ValueError, "bit-centered already"),
        (nn.ReLU, {}, ValueError, "no parameters"),
        (lambda: nn.LazyLinear(3), {}, TypeError, "not initialized"),
    ],
)
def test_what_cannot_be_bit_centered_is_refused_in_a_sentence(build, options, error, words):
    with pytest.raises(error, match=words):
        halp.bit_center(build(), **options)


def two_layers(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return halp.bit_center(nn.Sequential(nn.Linear(6, 8), *between, nn.Linear(8, 3)))


@pytest.mark.parametrize("between", [[], [nn.Dropout(0.1)], [nn.Identity()]])
def test_a_gradient_does_not_hold_on_to_the_graph_that_it_came_from(between, x, y):
    model = two_layers(*between)
    F.cross_entropy(model(x), y).backward()
    with halp.materialize(model):
        pass
    assert model[0].weight.grad.offset.norm() > 0


def test_converting_a_model_inside_a_live_graph_is_refused_and_changes_nothing(x, y):
    model = two_layers(nn.Linear(8, 8), nn.Dropout(0.1))
    F.cross_entropy(model(x), y).backward()
    gradient, output = model[0].weight.grad, model(x)
    for convert in (halp.to_plain, lambda m: halp.materialize(m).__enter__()):
        with pytest.raises(RuntimeError, match="an output or a loss .* is alive"):
            convert(model)
        assert all(isinstance(p, BitCenteredTensor) for p in model.parameters())
        assert model[0].weight.grad is gradient
    del output
    F.cross_entropy(model(x), y).backward()


def test_a_graph_made_inside_materialize_does_not_keep_the_model_plain(x):
    model = two_layers()
    parts = [(p.offset, p.delta.clone()) for p in model.parameters()]
    with halp.materialize(model):
        output = model(x)
    for p, (offset, delta) in zip(model.parameters(), parts, strict=True):
        assert p.offset is offset and torch.equal(p.delta, delta)
    with pytest.raises(RuntimeError, match="converted since the forward pass"):
        output.sum().backward()
    model(x).sum().backward()
    assert isinstance(model[0].weight.grad, BitCenteredTensor)
