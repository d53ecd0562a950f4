"""Activation checkpointing: the recomputation repeats the forward pass, bit for bit.

Checkpointing saves memory and must not change a number. So everything is compared with the same
computation without it.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import halp
from tests.optim.runs import LOW_PRECISION, PLAIN, SOLVERS_AND_ROUNDINGS, Run, assert_identical

WAYS = pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
#: Those in which every operation can draw bits of its own: a reentrant one is refused then.
WAYS_AND_ROUNDINGS = pytest.mark.parametrize(
    "reentrant, rounding", [(False, "near"), (False, "stoc"), (True, "near")]
)


class Blocks(nn.Module):
    """Runs its blocks one after another, each checkpointed or not."""

    def __init__(self, *blocks: nn.Module, reentrant: bool | None = None, **options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.run = lambda block, x: block(x)
        if reentrant is not None:
            self.run = partial(checkpoint, use_reentrant=reentrant, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def deciding_net(**how) -> Blocks:
    """Everything in a first pass that the backward pass depends on: masks, winners, dropout."""
    torch.manual_seed(0)
    return Blocks(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Dropout(0.3), nn.AdaptiveMaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.LeakyReLU(), nn.Hardtanh(-0.3, 0.3)),
        nn.Linear(8, 10),
        **how,
    )


X = torch.randn(6, 1, 10, 10, generator=torch.Generator().manual_seed(1))
Y = torch.arange(6)


def gradients_of(model: nn.Module, seed: int = 3) -> list[torch.Tensor]:
    """Return all parameters' gradients, that of the input too, after one pass."""
    torch.manual_seed(seed)
    x = X.clone().requires_grad_()
    cross_entropy(model(x), Y).backward()
    return [halp.value(p.grad) for p in [*model.parameters(), x]]


def moved(model: nn.Module) -> nn.Module:
    """Give the deltas of a bit-centered model values that change decisions."""
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        delta = 0.3 * torch.randn(p.shape, generator=generator)
        with torch.no_grad():
            p.delta.copy_(p.context.precision.nearest(delta))
    return model


# --- bit centering


def test_a_unit_that_the_delta_switches_off_gets_no_gradient_from_its_recomputation():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU())
    model[0].weight.data.fill_(1.03)
    halp.bit_center(model, "fp8_e4m3")
    model[0].weight.delta.fill_(-1.25)
    checkpoint(model, torch.ones(1, 1, requires_grad=True), use_reentrant=False).sum().backward()
    assert halp.value(model[0].weight.grad).item() == 0


@WAYS_AND_ROUNDINGS
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp16"])
def test_bit_centered_gradients_are_those_without_checkpointing(format, rounding, reentrant):
    found, expected = (
        gradients_of(moved(halp.bit_center(deciding_net(reentrant=way), format, rounding)))
        for way in (reentrant, None)
    )
    assert_identical(found, expected)


@pytest.mark.parametrize("rounding", ["near", "stoc"])
def test_regions_in_regions_are_repeated_too(rounding):
    def nested(reentrant):
        inner = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)]
        return Blocks(
            nn.Sequential(nn.Flatten(), nn.Linear(100, 8), nn.ReLU()),
            Blocks(*inner, reentrant=reentrant),
            nn.Linear(8, 10),
            reentrant=reentrant,
        )

    results = []
    for reentrant in (False, None):
        torch.manual_seed(0)
        model = moved(halp.bit_center(nested(reentrant), "fp8_e4m3", rounding))
        results.append(gradients_of(model))
    assert_identical(*results)


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("offsets", ["on-site", "cached"])
@pytest.mark.parametrize("solver", ["BitCenterSGD", "BitCenterSVRG"])
def test_bit_centered_steps_are_those_without_checkpointing(solver, offsets, rounding):
    results = []
    for reentrant in (False, None):
        model = deciding_net(reentrant=reentrant)
        precision = {"format": "fp8_e4m3", "rounding": rounding, "offsets": offsets}
        batches = [(X[:4], Y[:4]), (X[4:], Y[4:])]
        torch.manual_seed(5)
        run = Run(solver, model, batches, T=2, loss=mean_loss, precision=precision, momentum=0.9)
        results.append(run.steps(3).values)
    assert_identical(*results)


def mean_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x.clone().requires_grad_()), y)  # which reentrant regions want


# --- the solvers on plain models


@pytest.mark.parametrize(
    "solver, rounding, reentrant",
    [
        (solver, rounding, reentrant)
        for solver, rounding in SOLVERS_AND_ROUNDINGS
        for reentrant in ((False, True) if rounding == "near" else (False,))
        if solver in PLAIN
    ],
)
def test_steps_are_those_without_checkpointing(solver, rounding, reentrant):
    results = []
    for way in (reentrant, None):
        model = deciding_net(reentrant=way)
        precision = {"rounding": rounding} if solver in LOW_PRECISION else None
        torch.manual_seed(5)
        run = Run(solver, model, [(X, Y)], T=3, loss=mean_loss, precision=precision)
        results.append(run.steps(4).values)
    assert_identical(*results)


# --- emulate


@pytest.mark.parametrize("inside", [True, False], ids=["backward-inside", "backward-outside"])
@WAYS_AND_ROUNDINGS
def test_emulated_gradients_are_those_without_checkpointing(reentrant, inside, rounding):
    results = []
    for way in (reentrant, None):
        model, x = deciding_net(reentrant=way), X.clone().requires_grad_()
        torch.manual_seed(3)
        with halp.emulate("fp8_e4m3", rounding, seed=4) as block:
            loss = cross_entropy(model(x), Y)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert block.rounder.position > 0 or rounding == "near"
        results.append([p.grad for p in [*model.parameters(), x]])
    assert_identical(*results)


@WAYS
def test_a_plain_pass_is_recomputed_plainly_inside_a_block(reentrant):
    results = []
    for way in (reentrant, None):
        model, x = deciding_net(reentrant=way), X.clone().requires_grad_()
        torch.manual_seed(3)
        loss = cross_entropy(model(x), Y)
        with halp.emulate("fp8_e4m3"):
            loss.backward()
        results.append([p.grad for p in [*model.parameters(), x]])
    assert_identical(*results)


class EmulatedInside(nn.Module):
    """A block that is low-precision of its own accord."""

    def __init__(self, rounding: str, *, keep: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.new = lambda: halp.emulate("fp8_e4m3", rounding, seed=1)
        self.block = self.new() if keep else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(3 * x)
        with self.block or self.new():
            return torch.relu(self.linear(wide)) + wide


@pytest.mark.parametrize("keep", [True, False], ids=["one-block", "new-blocks"])
@WAYS_AND_ROUNDINGS
def test_a_block_within_a_region_is_entered_again_and_nothing_else_is_rounded(
    reentrant, rounding, keep
):
    results = []
    for way in (reentrant, None):
        torch.manual_seed(0)
        layers = [EmulatedInside(rounding, keep=keep) for _ in range(2)]
        model = Blocks(nn.Sequential(nn.Flatten(), nn.Linear(100, 8)), *layers, reentrant=way)
        results.append(gradients_of(model))
    assert_identical(*results)


@pytest.mark.parametrize("inside", [True, False], ids=["backward-inside", "backward-outside"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@WAYS_AND_ROUNDINGS
def test_recurrent_layers_go_through_their_cells_again(reentrant, rounding, kind, inside):
    results = []
    for way in (reentrant, None):
        torch.manual_seed(0)
        layer, x = kind(5, 4, batch_first=True), torch.randn(3, 6, 5, requires_grad=True)

        def outputs(x, layer=layer):
            return layer(x)[0]

        with halp.emulate("fp8_e4m3", rounding):
            y = outputs(x) if way is None else checkpoint(outputs, x, use_reentrant=way)
            loss = y.square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append([p.grad for p in layer.parameters()])
    assert_identical(*results)


# --- Quantize


@pytest.mark.parametrize("rounding", ["near", "stoc"])
@WAYS
def test_quantize_repeats_its_bits_and_its_count(reentrant, rounding):
    results = []
    for way in (reentrant, None):
        torch.manual_seed(0)
        precision = halp.Precision("fp8_e4m3", rounding)
        shared = halp.Quantize(precision, precision)
        blocks = [nn.Sequential(shared, nn.Linear(8, 8), shared) for _ in range(3)]
        model = Blocks(nn.Sequential(nn.Flatten(), nn.Linear(100, 8)), *blocks, reentrant=way)
        results.append([*gradients_of(model), shared.calls, *gradients_of(model)])
    assert_identical(*results)


def test_each_of_two_backward_passes_repeats_the_first_pass():
    torch.manual_seed(0)
    quantize = halp.Quantize(halp.Precision("fp8_e4m3", "stoc"))
    x = torch.randn(64, requires_grad=True)
    w = torch.ones(64, requires_grad=True)
    y = checkpoint(lambda x: quantize(x) * w, x, use_reentrant=False)
    for _ in range(2):
        w.grad = None
        y.sum().backward(retain_graph=True)
        assert torch.equal(w.grad, y)


def test_regions_are_found_below_other_hooks_on_saved_tensors():
    quantize = halp.Quantize(halp.Precision("fp8_e4m3", "stoc"))
    x, w = torch.randn(64, requires_grad=True), torch.ones(64, requires_grad=True)

    def layer(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = quantize(x)
        return y * w

    y = checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(w.grad, y)


def test_sequences_of_checkpointed_layers():
    def in_two(model, x):
        return checkpoint_sequential(model, 2, x, use_reentrant=False)

    results = []
    for run in (in_two, nn.Sequential.__call__):
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(100, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()]
        model = moved(halp.bit_center(nn.Sequential(*layers, nn.Linear(8, 10)), "fp16", "stoc"))
        cross_entropy(run(model, X.clone().requires_grad_()), Y).backward()
        results.append([halp.value(p.grad) for p in model.parameters()])
    assert_identical(*results)


# --- selective checkpointing


def selective():
    def policy(context, op, *args, **kwargs):
        saved = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def test_selective_checkpointing_repeats_emulated_operations_to_nearest():
    results = []
    for how in ({"reentrant": False, "context_fn": selective}, {}):
        with halp.emulate("fp8_e4m3"):
            results.append(gradients_of(deciding_net(**how)))
    assert_identical(*results)


def test_selective_checkpointing_repeats_bit_centered_operations_to_nearest():
    results = []
    for how in ({"reentrant": False, "context_fn": selective}, {}):
        results.append(gradients_of(moved(halp.bit_center(deciding_net(**how), "fp8_e4m3"))))
    assert_identical(*results)


OTHER_OPERATIONS = {
    "selective": {"reentrant": False, "context_fn": selective},
    "reentrant": {"reentrant": True},
}


@pytest.mark.parametrize("how", OTHER_OPERATIONS.values(), ids=OTHER_OPERATIONS.keys())
@pytest.mark.parametrize("engine", ["emulated", "bit-centered"])
def test_where_other_operations_are_recomputed_none_may_draw_bits(engine, how):
    """Without autograd, as a reentrant region runs first, PyTorch leaves out copies in a GRU."""
    model = deciding_net(**how)
    if engine == "bit-centered":
        moved(halp.bit_center(model, "fp8_e4m3", "stoc"))
    with pytest.raises(NotImplementedError, match=r"use checkpoint\(\.\.\., use_reentrant=False\)"):
        with halp.emulate("fp8_e4m3", "stoc") if engine == "emulated" else nullcontext():
            gradients_of(model)


def test_checkpointing_that_halp_does_not_know_is_refused():
    def pack(x):
        return x

    pack.__module__, pack.__qualname__ = "torch.utils.checkpoint", "_other_hook.pack_hook"
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        with pytest.raises(RuntimeError, match="cannot be repeated"), halp.emulate("fp16"):
            torch.ones(3) + 1
