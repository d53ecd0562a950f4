"""What is remembered of inputs, offsets and deltas is never stale, however they were written to."""

import numpy as np
import pytest
import torch
from torch import nn

import halp
from halp.bitcenter import CacheError
from halp.fingerprints import fingerprint

RIGHT = torch.tensor(3.3).bfloat16().float()


def by_numpy(x):
    x.detach().numpy()[...] = 3.3


def by_data(x):
    x.data.fill_(3.3)


def in_place(x):
    x.fill_(3.3)


WRITES = [by_numpy, by_data, in_place]
write_by = pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)


def linear(offsets="on-site", **options) -> nn.Module:
    """Return a bit-centered layer whose delta is 1/2 everywhere."""
    layer = nn.Linear(4, 3, bias=False)
    nn.init.ones_(layer.weight)
    model = halp.bit_center(layer, "bf16", offsets=offsets, **options)
    model.weight.delta.fill_(0.5)
    return model


@write_by
def test_an_input_is_read_as_it_is_now(write):
    model, x = linear(), torch.ones(2, 4)
    assert (model(x).delta == 2).all()
    write(x)
    assert torch.equal(model(x).delta, (4 * 0.5 * RIGHT).bfloat16().float().expand(2, 3))


@write_by
def test_the_backward_pass_reads_an_input_as_it_is_now(write):
    """As PyTorch does of memory that is changed past its version counter."""
    model, x = linear(), torch.ones(2, 4)
    loss = model(x).square().sum()
    if write is in_place:
        write = by_data  # PyTorch refuses the other
    write(x)
    loss.backward()
    of_output = 2 * 2.0  # dδ of a sum of squares: 2e for each of 2 rows
    expected = (2 * of_output * RIGHT).bfloat16().float()
    assert torch.equal(model.weight.grad.delta, expected.expand(3, 4))


@write_by
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.t(), lambda w: w[:, 1:]])
def test_an_offset_is_read_as_it_is_now(write, view):
    model = linear()
    with torch.no_grad():
        see = lambda: view(model.weight.detach()).low_offset  # noqa: E731
        assert (see() == 1).all()
        write(model.weight.offset)
        assert (see() == RIGHT).all()
        model.weight.offset.numpy()[...] = 5.0
        assert (see() == 5).all()


def test_an_offset_taken_before_it_is_read_is_watched_too():
    model = linear()
    array = model.weight.offset.numpy()
    assert (model.weight.low_offset == 1).all()
    array[...] = 3.3
    assert (model.weight.low_offset == RIGHT).all()


def test_an_array_of_a_view_reaches_the_whole():
    model = linear()
    with torch.no_grad():
        assert (model.weight.low_offset == 1).all()
        model.weight.detach().t()[2:].offset.numpy()[...] = 3.3
    assert (model.weight.low_offset[:, 2:] == RIGHT).all()
    assert (model.weight.low_offset[:, :2] == 1).all()


def test_an_offset_of_a_result_is_watched_between_forward_and_backward():
    model, x = linear(), torch.ones(2, 4)
    h = model(x).detach()
    assert (h.low_offset == 4).all()
    h.offset.numpy()[...] = 3.3
    assert (h.low_offset == RIGHT).all()


@pytest.mark.parametrize("looks_at", ["weight", "view", "result"])
def test_looking_at_offsets_changes_no_random_bits(looks_at):
    x, results = torch.rand(2, 4, generator=torch.Generator().manual_seed(0)), []
    for looks in (False, True):
        torch.manual_seed(0)
        model = halp.bit_center(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), "fp8_e4m3", "stoc")
        model[0].weight.delta.fill_(0.5)
        h = model(x)
        if looks:
            w = model[0].weight
            {"weight": w, "view": w.detach().t(), "result": h.detach()}[looks_at].offset.numpy()
        h.square().sum().backward()
        results.append(model[0].weight.grad.delta)
    assert torch.equal(*results)


@write_by
def test_a_delta_that_was_zero_is_no_constant_once_it_is_written_to(write):
    model, x = halp.bit_center(nn.Linear(4, 3, bias=False), "bf16"), torch.ones(2, 4)
    assert model.weight.is_constant
    assert not model(x).delta.any()
    write(model.weight.delta)
    assert not model.weight.is_constant
    assert (model(x).delta != 0).all()


# --- snapshots


def trained(offsets="on-site", solver=halp.optim.BitCenterSVRG):
    model = linear(offsets)
    optimizer = solver(model.parameters(), lr=0.125, T=10)
    x = torch.ones(2, 4)

    def closure(x=x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.snapshot([(x,)], closure)
    return model, optimizer, closure, x


@write_by
@pytest.mark.parametrize("offsets", ["on-site", "cached"])
def test_a_center_that_was_written_to_makes_a_snapshot_due(write, offsets):
    model, optimizer, closure, _ = trained(offsets)
    optimizer.step(closure)
    assert not optimizer.snapshot_due
    write(model.weight.offset)
    assert optimizer.snapshot_due
    if offsets == "cached":
        with pytest.raises(RuntimeError, match="were written to since the snapshot"):
            optimizer.step(closure)


def test_looking_at_a_center_makes_no_snapshot_due():
    model, optimizer, closure, _ = trained()
    model.weight.offset.numpy()
    halp.value(model.weight)
    optimizer.step(closure)
    assert not optimizer.snapshot_due


@pytest.mark.parametrize("write", [by_numpy, by_data], ids=lambda f: f.__name__)
def test_writing_inside_materialize_sets_the_center(write):
    model = linear()
    with halp.materialize(model):
        write(model.weight)
    assert torch.equal(halp.value(model.weight), torch.full((3, 4), 3.3))
    assert not model.weight.delta.any()


def test_not_writing_inside_materialize_keeps_both_parts():
    model = linear()
    with halp.materialize(model):
        model.weight.detach().numpy().sum()
    assert (model.weight.delta == 0.5).all()
    assert (model.weight.offset == 1).all()


# --- cached offsets


@write_by
def test_a_refilled_buffer_is_no_batch_that_the_snapshot_saw(write):
    _, optimizer, closure, x = trained("cached")
    optimizer.step(closure)
    write(x)
    with pytest.raises(CacheError, match="this batch is none of the 1"):
        optimizer.step(closure)


def test_batches_in_one_buffer_are_recognized():
    """Also where a pass over the model begins without a solver's step."""
    model = linear("cached")
    optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.125, T=10)
    buffer = np.zeros((2, 4), np.float32)
    x = torch.from_numpy(buffer)

    class Refilled:
        """A loader with one buffer for every batch."""

        def __iter__(self):
            for number in (1.0, 3.0, 5.0):
                buffer[:] = number
                yield x

    def closure(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.snapshot(Refilled(), closure)
    model.weight.delta.fill_(0.5)
    for number, batch in zip((1.0, 3.0, 5.0), Refilled(), strict=True):
        assert (model(batch).delta == 2 * number).all()


def test_a_buffer_that_is_refilled_within_a_pass_is_told_apart():
    """A closure over two micro-batches that share memory."""
    deltas, losses = [], []
    for offsets in ("on-site", "cached"):
        model = linear(offsets)
        optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.125, T=10)
        buffer = np.zeros((2, 4), np.float32)
        x = torch.from_numpy(buffer)

        def closure(buffer=buffer, x=x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            total = 0.0
            for number in (1.0, 3.0):
                buffer[:] = number
                loss = model(x).square().mean()
                loss.backward()
                total += float(halp.value(loss))
            return torch.tensor(total)

        optimizer.snapshot([(x,)], lambda x: closure())  # noqa: B023
        losses.append([float(optimizer.step(closure)) for _ in range(3)])
        deltas.append(model.weight.delta)
    assert torch.equal(*deltas)
    assert losses[0] == losses[1]


# --- fingerprints


def test_fingerprints_tell_tensors_of_zeros_and_ones_apart():
    """Words that differ in their high bits only leave a 32-bit sum few values to take."""
    generator = torch.Generator().manual_seed(0)
    masks = (torch.rand(3000, 50, generator=generator) > 0.5).float()
    assert len(set(map(fingerprint, masks))) == len({tuple(m) for m in masks.tolist()})


def test_fingerprints_change_with_any_word_shape_or_dtype():
    x = torch.zeros(6)
    changed = [x.clone() for _ in range(6)]
    for i, y in enumerate(changed):
        y.view(torch.int32)[i] ^= 1 << (5 * i)
    others = [x.view(2, 3), x.int(), x.double(), x.half(), torch.zeros(7), -x, x.bool()]
    assert len({fingerprint(y) for y in (x, *changed, *others)}) == 1 + 6 + 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("solver", [halp.optim.BitCenterSGD, halp.optim.BitCenterSVRG])
@pytest.mark.parametrize("offsets", ["on-site", "cached"])
def test_autocast_around_a_bit_centered_model_is_refused_with_a_way_out(offsets, solver, dtype):
    """Also in a snapshot, whose full gradient would be of low precision."""
    model, x = linear(offsets), torch.ones(2, 4)
    optimizer = solver(model.parameters(), lr=0.125, T=10)

    def closure(x=x, enabled=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            loss = model(x).square().mean()
        loss.backward()
        return loss

    refused = pytest.raises(RuntimeError, match=r"(?si)bit-centered.*autocast.*(leave|disable)")
    if solver is halp.optim.BitCenterSVRG or offsets == "cached":
        with refused:
            optimizer.snapshot([(x,)], closure)
    optimizer.snapshot([(x,)], lambda x: closure(x, enabled=False))
    with refused:
        optimizer.step(closure)
    with halp.materialize(model), torch.autocast("cpu", dtype=dtype):
        assert model(x).dtype == dtype


@pytest.mark.parametrize("offsets", ["on-site", "cached"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_input_in_half_precision_is_promoted(dtype, offsets):
    deltas = []
    for x in (torch.full((2, 4), 1.5), torch.full((2, 4), 1.5, dtype=dtype)):
        model = linear(offsets)
        optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.125, T=10)

        def closure(x=x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.snapshot([(x,)], closure)
        optimizer.step(closure)
        deltas.append(model.weight.delta)
    assert torch.equal(*deltas)
