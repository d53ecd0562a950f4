"""Discrete decisions: offset and full value each follow their own, and the delta is the difference.

In most tests here the offset and the full value decide differently.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from halp.bitcenter import BitCenteredTensor
from tests.bitcenter.test_rules import bit_centering

#: Offset and delta: the full value is (-0.5, 3, 0.25, -1, 2), of which 1, 3 and 4 changed sign.
U = torch.tensor([-1.0, 2.0, 1.0, 1.0, -1.0])
E = torch.tensor([0.5, 1.0, -0.75, -2.0, 3.0])
ROWS_U = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 1.0], [0.0, 1.0, 4.0]])
ROWS_E = torch.tensor([[2.0, 0.5, 0.0], [0.0, 0.0, 0.0], [8.0, 0.0, -4.0]])


def vector() -> BitCenteredTensor:
    return bit_centering()(U, E)


def rows() -> BitCenteredTensor:
    return bit_centering()(ROWS_U, ROWS_E)


def assert_both(result: Tensor, run: Callable[[Tensor], Tensor], u: Tensor, e: Tensor) -> None:
    """Check that a result carries what the offset alone gives, and what the full value gives."""
    assert type(result) is BitCenteredTensor
    assert type(result.offset) is type(result.delta) is Tensor
    before, after = run(u), run(u + e)
    assert result.dtype == before.dtype
    assert torch.equal(result.offset, before)
    assert torch.equal(result.value, after)
    if before.is_floating_point():
        torch.testing.assert_close(result.delta, after - before, rtol=1e-6, atol=0)


COMPARISONS: dict[str, Callable[[Tensor], Tensor]] = {
    "greater": lambda x: x > 0,
    "less": lambda x: x < 1,
    "greater or equal": lambda x: x >= 2,
    "less or equal": lambda x: x <= -1,
    "equal": lambda x: x == 2,
    "unequal": lambda x: x != 2,
    "against a tensor": lambda x: x > torch.tensor([0.0, 2.5, 0.5, 0.0, 3.0]),
    "number first": lambda x: 0 < x,
    "not": lambda x: ~(x > 0),
    "and": lambda x: (x > 0) & (x < 2),
    "or": lambda x: (x > 2) | (x < 0),
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "argsort": torch.argsort,
    "count": lambda x: (x > 0).sum(),
    "any": lambda x: (x > 2.5).any(),
    "all": lambda x: (x < 3).all(),
    "to int": lambda x: x.int(),
    "to bool": lambda x: x.bool(),
    "to float": lambda x: (x > 0).float(),
    "mask times value": lambda x: (x > 0) * x,
    "value times mask": lambda x: x * (x > 0),
    "count times value": lambda x: (x > 0).sum() * x,
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "where, numbers": lambda x: torch.where(x > 0, 1.0, -1.0),
    "where, plain tensors": lambda x: torch.where(x > 0, torch.ones(5), torch.arange(5.0)),
    "where, both": lambda x: torch.where(x > 0, x, x * x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.5),
    "masked_fill, tensor": lambda x: x.masked_fill(x > 0, x.sum()),
    "masked_fill, plain": lambda x: torch.arange(5.0).masked_fill(x > 0, 7.0),
    "relu": torch.relu,
    "leaky relu": lambda x: F.leaky_relu(x, 0.25),
    "threshold": lambda x: F.threshold(x, 0.375, 5.0),
    "hardtanh": F.hardtanh,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.75, 1.5),
    "maximum": lambda x: torch.maximum(x, torch.tensor([0.0, 2.5, 0.5, 0.0, 3.0])),
    "one hot": lambda x: F.one_hot(x.argmax(), 5),
    "index by argmax": lambda x: x[x.argmax()],
    "index by argsort": lambda x: x[x.argsort()],
}
BY_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda x: x.argmax(1),
    "argmax, keepdim": lambda x: x.argmax(1, keepdim=True),
    "argmin": lambda x: x.argmin(0),
    "gather by argmax": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "correct": lambda x: x.argmax(1) == torch.tensor([1, 0, 0]),
    "rows by argmax": lambda x: x.index_select(0, x.argmax(1)),
}


@pytest.mark.parametrize("run", COMPARISONS.values(), ids=COMPARISONS.keys())
def test_a_decision_is_taken_on_the_offset_and_on_the_full_value(run):
    assert_both(run(vector()), run, U, E)


@pytest.mark.parametrize("run", BY_ROWS.values(), ids=BY_ROWS.keys())
def test_a_decision_by_rows_is_taken_on_the_offset_and_on_the_full_value(run):
    assert_both(run(rows()), run, ROWS_U, ROWS_E)


def test_a_plain_mask_decides_alike_for_both():
    mask = torch.tensor([True, False, True, False, True])
    for run in (
        lambda x: torch.where(mask, x, 0.5),
        lambda x: torch.where(mask, 0.5, x),
        lambda x: x.masked_fill(mask, 0.5),
        lambda x: x[mask],
        lambda x: mask * x,
    ):
        assert_both(run(vector()), run, U, E)


def test_accuracy_is_that_of_the_full_value():
    torch.manual_seed(0)
    u, e, y = torch.randn(64, 10), torch.randn(64, 10), torch.randint(10, (64,))
    logits = bit_centering("fp16", "near")(u, e)
    true = ((u + e).argmax(1) == y).float().mean().item()
    assert true != (u.argmax(1) == y).float().mean().item()
    assert (logits.argmax(1) == y).float().mean().item() == true
    assert (logits.argmax(1) == y).sum().item() == (64 * true)
    assert (logits.argmax(1) == y).float().mean().value == true


@pytest.mark.parametrize("n", [7, 60, 1000])
def test_accuracy_of_any_number_of_samples_is_that_of_the_full_value_to_a_roundoff(n):
    """The mean is an operation like others: what the delta changes in it is rounded."""
    torch.manual_seed(n)
    u, e, y = torch.randn(n, 3), torch.randn(n, 3), torch.randint(3, (n,))
    logits = bit_centering("fp16", "near")(u, e)
    true = ((u + e).argmax(1) == y).float().mean().item()
    change = abs(true - (u.argmax(1) == y).float().mean().item())
    error = abs((logits.argmax(1) == y).float().mean().item() - true)
    assert error <= 2**-11 * change + 1e-6


def test_a_jump_is_as_right_as_float32_however_large_the_offset():
    """The delta of ``where`` is a difference only where the decisions differ."""
    u, e = torch.tensor([1e4, -1e4, 1e-3]), torch.tensor([1e-9, 1e-9, -2e-3])
    delta = torch.where(bit_centering()(u, e) > 0, bit_centering()(u, e), 0.0).delta
    torch.testing.assert_close(delta, torch.tensor([1e-9, 0.0, -1e-3]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1.0, 1e-8, 1e-30])
def test_relu_at_exactly_zero_follows_the_delta(size):
    u, e = torch.zeros(3), size * torch.tensor([1.0, -1.0, 0.0])
    x = bit_centering()(u, e).requires_grad_()
    y = torch.relu(x)
    assert torch.equal(y.delta, e.clamp(min=0))
    y.sum().backward()
    assert torch.equal(x.grad.offset, torch.zeros(3))
    assert torch.equal(x.grad.value, torch.tensor([1.0, 0.0, 0.0]))


def check_gradient(run: Callable[[Tensor], Tensor], u: Tensor = U, e: Tensor = E) -> None:
    """Compare gradients at the offset and at the full value with those of plain tensors."""
    x = bit_centering()(u, e).requires_grad_()
    run(x).square().sum().backward()
    for computed, at in ((x.grad.offset, u), (x.grad.value, u + e)):
        plain = at.clone().requires_grad_()
        run(plain).square().sum().backward()
        torch.testing.assert_close(computed, plain.grad)


SMOOTH_BETWEEN = [
    "mask times value",
    "value times mask",
    "where",
    "where, both",
    "masked_fill",
    "relu",
    "leaky relu",
    "threshold",
    "hardtanh",
    "abs",
    "clamp",
    "maximum",
]


@pytest.mark.parametrize("name", SMOOTH_BETWEEN)
def test_the_gradient_of_a_decision_follows_it(name):
    check_gradient(COMPARISONS[name])


def test_the_gradient_of_a_gather_follows_its_indices():
    check_gradient(BY_ROWS["gather by argmax"], ROWS_U, ROWS_E)


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda x: torch.relu(torch.relu(x)),
    "threshold after relu": lambda x: F.threshold(torch.relu(x), 0.375, 0.0),
    "relu after threshold": lambda x: torch.relu(F.threshold(x, 0.375, -1.0)),
    "in place": lambda x: F.relu(x * 1, inplace=True),
    "scaled after": lambda x: torch.relu(x) * -2,
    "reshaped": lambda x: torch.relu(x.view(5, 1)).view(5),
    "of a slice": lambda x: torch.relu(x[1:4]),
    "relu6": F.relu6,
}


@pytest.mark.parametrize("run", CHAINS.values(), ids=CHAINS.keys())
def test_relus_in_chains_decide_each_for_itself(run):
    assert_both(run(vector()), run, U, E)
    check_gradient(run)


def test_decisions_survive_detach_and_clone():
    y = torch.relu(vector())
    for kept in (y.detach(), y.clone(), y.data):
        assert torch.equal(kept.decision, U + E > 0)


def test_backward_repeats_the_decision_of_the_forward_pass_to_the_letter():
    """Rounding may move u + e across zero between the two passes: the mask must not move."""
    torch.manual_seed(0)
    u = torch.randn(4096)
    e = -u * (1 + 1e-7 * torch.randn(4096))
    x = bit_centering("fp16", "near")(u, e).requires_grad_()
    y = torch.relu(x)
    passed = y.decision
    y.sum().backward()
    assert 0 < passed.sum() < 4096
    assert torch.equal(x.grad.value, passed.float())
