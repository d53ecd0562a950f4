"""Rounding really happens: a spy looks at every low-precision number of inner steps (row 9).

Whether a number lies on a format's grid is decided by NumPy's float16 and ml_dtypes' float8, with
a scale computed from the tensor's largest magnitude by hand.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import halp
from halp.bitcenter import BitCenteredTensor, dispatch
from halp.bitcenter.operands import Operand
from tests.bitcenter.number_grids import GRIDS, Grid
from tests.cases import (
    BATCH_NORM_NET,
    DROPOUT,
    LENET,
    LOGISTIC,
    RELU,
    SMOOTH,
    TAGGER,
    VARIATIONS,
    Case,
)

MODELS = [LOGISTIC[0], RELU[0], SMOOTH[7], DROPOUT[0], VARIATIONS[4]]
NETS = [LENET, BATCH_NORM_NET, TAGGER]
STEPS, T = 4, 2


class Spy:
    """Notes what bit-centered operations read and return, and whether it is on the grid."""

    def __init__(self, grid: Grid, scale: str | None) -> None:
        self.grid = grid
        self.scale = scale
        self.seen: Counter[str] = Counter()
        self.off_grid: Counter[str] = Counter()

    def look(self, what: str, x: Tensor | None) -> None:
        if x is None or x.numel() == 0:
            return
        assert type(x) is Tensor or type(x) is torch.nn.Parameter, f"{what} is a {type(x)}"
        self.seen[what] += 1
        if not self.grid.holds(x.detach().numpy(), self.scale):
            self.off_grid[what] += 1

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Look at every operand that a rule is given and every result of an operation."""
        make, offset = Operand.__init__, Operand.offset.fget

        def made(operand: Operand, *args: Any) -> None:
            make(operand, *args)
            if not operand.decides:
                self.look("delta operand", operand.delta)

        def read(operand: Operand) -> Tensor:
            rounded = offset(operand)
            cache = operand._context.cache
            if cache is None or not cache.recording:  # in a snapshot nothing is computed with it
                self.look("offset operand", rounded)
            return rounded

        monkeypatch.setattr(Operand, "__init__", made)
        monkeypatch.setattr(Operand, "offset", property(read))
        for op, handler in list(dispatch.HANDLERS.items()):

            def handled(func: Any, *args: Any, handler: Any = handler) -> Any:
                result = handler(func, *args)
                for part in result if isinstance(result, tuple | list) else [result]:
                    if type(part) is BitCenteredTensor and part.is_floating_point():
                        self.look(f"result of {func}", part.delta)
                return result

            monkeypatch.setitem(dispatch.HANDLERS, op, handled)


def train(case: Case, solver: type, spy: Spy, **precision: Any) -> None:
    """Take some inner steps, and look at what the solver keeps after each."""
    torch.manual_seed(0)
    model = halp.bit_center(case.model(), **precision)
    optimizer = solver(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, T=T)
    batches = case.batches(2, 16)

    def closure(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = case.loss_of(model, x, y)
        loss.backward()
        return loss

    for step in range(STEPS):
        if optimizer.snapshot_due:
            optimizer.snapshot(batches, closure)
        optimizer.step(lambda step=step: closure(*batches[step % 2]))
        for p in model.parameters():
            spy.look("z", p.delta)
            spy.look("delta gradient", p.grad.delta)
            spy.look("momentum buffer", optimizer.state[p]["momentum_buffer"])
            spy.look("full gradient", optimizer.state[p].get("full_gradient"))
            assert spy.scale is None or p.delta.abs().max() > 0


@pytest.mark.parametrize("format", GRIDS)
@pytest.mark.parametrize("case", [*MODELS, *NETS], ids=str)
def test_so_it_is_with_cached_offsets(case, format, monkeypatch):
    spy = Spy(GRIDS[format], "auto")
    spy.watch(monkeypatch)
    train(case, halp.optim.BitCenterSVRG, spy, format=format, rounding="near", offsets="cached")
    assert not spy.off_grid
    assert spy.seen["offset operand"] >= STEPS


@pytest.mark.parametrize("scale", ["auto", None])
@pytest.mark.parametrize("rounding", ["near", "stoc"])
@pytest.mark.parametrize("format", GRIDS)
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_every_low_precision_number_of_an_inner_step_is_on_the_grid(
    case, format, rounding, scale, monkeypatch
):
    spy = Spy(GRIDS[format], scale)
    spy.watch(monkeypatch)
    train(case, halp.optim.BitCenterSVRG, spy, format=format, rounding=rounding, scale=scale)
    assert not spy.off_grid
    for what in ("delta operand", "offset operand", "z", "full gradient", "momentum buffer"):
        assert spy.seen[what] >= STEPS
    results = [what for what in spy.seen if what.startswith("result of")]
    assert len(results) >= 8
    assert sum(spy.seen.values()) > 20 * STEPS


@pytest.mark.parametrize("format", GRIDS)
@pytest.mark.parametrize("case", NETS, ids=str)
def test_those_of_convolutional_and_recurrent_nets_are_on_the_grid(case, format, monkeypatch):
    spy = Spy(GRIDS[format], "auto")
    spy.watch(monkeypatch)
    train(case, halp.optim.BitCenterSVRG, spy, format=format, rounding="near", scale="auto")
    assert not spy.off_grid
    assert sum(spy.seen.values()) > 20 * STEPS


@pytest.mark.parametrize("format", GRIDS)
def test_those_of_bc_sgd_are_on_the_grid(format, monkeypatch):
    spy = Spy(GRIDS[format], "auto")
    spy.watch(monkeypatch)
    train(RELU[0], halp.optim.BitCenterSGD, spy, format=format)
    assert not spy.off_grid


def test_the_spy_sees_numbers_that_are_not_rounded(monkeypatch):
    spy = Spy(GRIDS["fp16"], "auto")
    spy.watch(monkeypatch)
    train(RELU[0], halp.optim.BitCenterSVRG, spy, rounding="void")
    for what in ("delta operand", "offset operand", "z", "full gradient", "momentum buffer"):
        assert spy.off_grid[what] > 0


@pytest.mark.parametrize("scale", ["auto", None])
@pytest.mark.parametrize("format", GRIDS)
def test_the_oracle_knows_the_formats_values_from_their_neighbours(format, scale):
    grid = GRIDS[format]
    rng = np.random.default_rng(0)
    x = grid.round(0.1 * rng.standard_normal(1000), scale)
    assert grid.holds(x, scale)
    off = x.copy()
    off[17] *= 1 + 2.0 ** -(grid.fraction_bits + 2)
    assert not grid.holds(off, scale)


@pytest.mark.parametrize("scale", ["auto", None])
@pytest.mark.parametrize("format", GRIDS)
@pytest.mark.parametrize("size", [1e3, 1.0, 1e-3, 1e-6, 1e-20])
def test_deltas_are_rounded_to_the_very_value_that_numpy_rounds_them_to(format, scale, size):
    grid, rng = GRIDS[format], np.random.default_rng(1)
    x = np.float32(size * rng.standard_normal(1000)).astype(np.float64)
    values = grid.round(x[:500], scale)
    ties = values + grid.spacing(values, scale) / 2
    x = torch.from_numpy(np.concatenate([x, ties])).float()
    rounded = halp.quantize(x, format, scale=scale)
    expected = grid.round(x.double().numpy(), scale)
    assert np.array_equal(rounded.double().numpy(), expected)
