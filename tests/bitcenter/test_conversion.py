"""Whatever hangs on a parameter stays there: hooks, attributes, its class."""

import copy
import multiprocessing
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import halp
from halp.bitcenter import BitCenteredTensor, is_bit_centered


class TaggedParameter(nn.Parameter):
    """As large libraries have them, to mark how a parameter is distributed."""


def tagged_layer() -> tuple[nn.Linear, list]:
    """A layer whose weight has one of everything, and the calls of its hooks."""
    torch.manual_seed(0)
    layer, calls = nn.Linear(4, 3), []
    layer.weight = TaggedParameter(layer.weight.detach().clone())
    layer.weight.lr_scale = 0.1
    layer.weight.register_hook(lambda g: g * 0)
    layer.weight.register_post_accumulate_grad_hook(calls.append)
    return layer, calls


def run(layer: nn.Module) -> torch.Tensor:
    layer.zero_grad()
    layer(torch.ones(2, 4)).sum().backward()
    return halp.value(layer.weight.grad)


def assert_all_there(layer: nn.Linear, calls: list) -> None:
    before = len(calls)
    assert not run(layer).any() and layer.bias.grad is not None
    assert len(calls) == before + 1 and calls[-1] is layer.weight
    assert layer.weight.lr_scale == 0.1


def test_everything_survives_bit_centering_and_the_way_back():
    layer, calls = tagged_layer()
    halp.bit_center(layer)
    assert_all_there(layer, calls)
    assert not layer.weight.grad.offset.any() and not layer.weight.grad.delta.any()
    with halp.materialize(layer):
        assert type(layer.weight) is TaggedParameter
        assert_all_there(layer, calls)
    assert is_bit_centered(layer)
    assert_all_there(layer, calls)
    halp.to_plain(layer)
    assert type(layer.weight) is TaggedParameter and type(layer.bias) is nn.Parameter
    assert_all_there(layer, calls)


MOVES = {
    "double": lambda layer: layer.double().float(),
    "to": lambda layer: layer.to("cpu", torch.float64).to(torch.float32),
    "share_memory": nn.Module.share_memory,
    "train": nn.Module.train,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_everything_survives_what_modules_do_to_parameters(move):
    layer, calls = tagged_layer()
    model = nn.Sequential(halp.bit_center(layer))
    move(model)
    assert_all_there(layer, calls)
    halp.to_plain(model)
    assert type(layer.weight) is TaggedParameter
    assert_all_there(layer, calls)


def test_hooks_and_attributes_from_inside_a_block_stay():
    layer, calls = nn.Linear(4, 3), []
    halp.bit_center(layer)
    with halp.materialize(layer):
        layer.weight.note = "inside"
        layer.weight.register_hook(lambda g: 2 * g)
        layer.weight.register_post_accumulate_grad_hook(calls.append)
        assert torch.equal(run(layer), torch.full((3, 4), 4.0))
    assert torch.equal(run(layer), torch.full((3, 4), 4.0))
    assert layer.weight.note == "inside" and len(calls) == 2


def test_handles_still_remove_their_hooks():
    layer = nn.Linear(4, 3)
    handle = layer.weight.register_hook(lambda g: g * 0)
    halp.bit_center(layer)
    other = layer.weight.register_hook(lambda g: 3 * g)
    handle.remove()
    assert torch.equal(run(layer), torch.full((3, 4), 6.0))
    halp.to_plain(layer)
    other.remove()
    assert torch.equal(run(layer), torch.full((3, 4), 2.0))


def test_everything_is_there_after_a_conversion_that_failed():
    layer, calls = tagged_layer()
    output = layer.weight * layer.weight
    with pytest.raises(RuntimeError, match="still part of an autograd graph"):
        halp.bit_center(layer)
    del output
    assert type(layer.weight) is TaggedParameter
    assert_all_there(layer, calls)


def test_copies_and_pickles_keep_attributes():
    layer, _ = tagged_layer()
    layer.weight.names_of_rows = ["a", "b", "c"]
    halp.bit_center(layer)
    for clone in (copy.deepcopy(layer), copy.deepcopy(layer).weight):
        weight = getattr(clone, "weight", clone)
        assert weight.lr_scale == 0.1 and weight.names_of_rows == ["a", "b", "c"]
        assert weight.names_of_rows is not layer.weight.names_of_rows
    layer.weight._backward_hooks = layer.weight._post_accumulate_grad_hooks = None
    again = pickle.loads(pickle.dumps(layer))
    assert again.weight.lr_scale == 0.1
    assert type(halp.to_plain(again).weight) is TaggedParameter
    assert type(copy.deepcopy(layer).double().weight) is BitCenteredTensor


def test_names_that_a_bit_centered_tensor_has_itself_are_refused():
    layer = nn.Linear(4, 3)
    layer.bias.offset = 3
    with pytest.raises(ValueError, match=r"parameter 'bias' has an attribute 'offset'"):
        halp.bit_center(layer)
    assert not is_bit_centered(layer)


def test_parameters_that_compute_in_their_own_way_are_refused():
    class Own(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    layer = nn.Linear(4, 3)
    layer.weight = Own(torch.ones(3, 4))
    with pytest.raises(TypeError, match=r"parameter 'weight' is a Own"):
        halp.bit_center(layer)


def test_weak_references_are_named_as_what_is_in_the_way():
    import weakref

    layer = nn.Linear(4, 3)
    reference = weakref.ref(layer.weight)
    with pytest.raises(RuntimeError, match="'weight' has weak references"):
        halp.bit_center(layer)
    assert reference() is layer.weight


# --- tensors that modules compute from parameters


def test_a_pruned_model_is_bit_centered_and_stays_pruned():
    plain, layer = (nn.Linear(4, 3) for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    for each in (plain, layer):
        torch.manual_seed(0)
        prune.random_unstructured(each, "weight", 0.5)
    halp.bit_center(layer)
    with torch.no_grad():
        layer.weight_orig.delta.fill_(0.25)
        plain.weight_orig.add_(0.25)
    x = torch.ones(2, 4)
    assert torch.allclose(halp.value(layer(x)), plain(x), rtol=1e-3)
    layer(x).sum().backward()
    assert not (halp.value(layer.weight_orig.grad) * (1 - plain.weight_mask)).any()


def test_old_weight_norm_no_longer_names_an_output_that_nobody_holds():
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(4, 3))
    halp.bit_center(layer)
    with pytest.raises(NotImplementedError, match="weight_norm"):
        layer(torch.ones(2, 4))


def test_a_tensor_computed_once_is_named():
    layer = nn.Linear(4, 3)
    layer.scaled = 2 * layer.weight
    model = nn.Sequential(layer)
    with pytest.raises(ValueError, match=r"'scaled' of module '0' was computed"):
        halp.bit_center(model)


# --- shared memory


def double_in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def test_another_process_writes_to_a_shared_model():
    layer = halp.bit_center(nn.Linear(4, 3))
    layer.weight.delta.fill_(0.5)
    before = halp.value(layer.weight)
    assert not layer.weight.is_shared()
    layer.share_memory()
    assert layer.weight.is_shared()
    process = multiprocessing.get_context("spawn").Process(target=double_in_place, args=(layer,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert torch.equal(halp.value(layer.weight), 2 * before)
