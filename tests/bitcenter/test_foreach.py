"""Operations on lists of bit-centered tensors, and the optimizers and averages that use them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import utils
from torch.optim import swa_utils

import halp
from tests.bitcenter.test_rules import bit_centering

torch.manual_seed(0)
U = [torch.rand(3, 4, dtype=torch.float64) + 0.5 for _ in range(6)]
E = [0.01 * torch.randn(3, 4, dtype=torch.float64) for _ in range(6)]
INPUTS, LABELS = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))

#: Of each, what it does to lists of two tensors.
OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda x, y, z: torch._foreach_add(x, y, alpha=3),
    "add, number": lambda x, y, z: torch._foreach_add(x, 2),
    "add, numbers": lambda x, y, z: torch._foreach_add(x, [2, 3.0]),
    "add, tensor": lambda x, y, z: torch._foreach_add(x, torch.tensor(2.0), alpha=2),
    "addcdiv": lambda x, y, z: torch._foreach_addcdiv(x, y, z, value=2),
    "addcdiv, numbers": lambda x, y, z: torch._foreach_addcdiv(x, y, z, [2.0, 3.0]),
    "addcmul, tensor": lambda x, y, z: torch._foreach_addcmul(x, y, z, torch.tensor([2.0, 3.0])),
    "clamp_min": lambda x, y, z: torch._foreach_clamp_min(x, y),
    "clone": lambda x, y, z: torch._foreach_clone(x),
    "div": lambda x, y, z: torch._foreach_div(x, y),
    "exp": lambda x, y, z: torch._foreach_exp(x),
    "lerp": lambda x, y, z: torch._foreach_lerp(x, y, 0.25),
    "lerp, lists": lambda x, y, z: torch._foreach_lerp(x, y, z),
    "maximum": lambda x, y, z: torch._foreach_maximum(x, y),
    "maximum, number": lambda x, y, z: torch._foreach_maximum(x, 0.9),
    "mul": lambda x, y, z: torch._foreach_mul(x, y),
    "neg": lambda x, y, z: torch._foreach_neg(x),
    "pow": lambda x, y, z: torch._foreach_pow(x, 2),
    "reciprocal": lambda x, y, z: torch._foreach_reciprocal(x),
    "sqrt": lambda x, y, z: torch._foreach_sqrt(x),
    "sub": lambda x, y, z: torch._foreach_sub(x, y),
    "add_": lambda x, y, z: torch._foreach_add_(x, y, alpha=-0.5),
    "addcdiv_": lambda x, y, z: torch._foreach_addcdiv_(x, y, z, [2.0, 3.0]),
    "addcmul_": lambda x, y, z: torch._foreach_addcmul_(x, y, z, value=0.5),
    "copy_": lambda x, y, z: torch._foreach_copy_(x, y),
    "div_": lambda x, y, z: torch._foreach_div_(x, [2.0, 3.0]),
    "lerp_": lambda x, y, z: torch._foreach_lerp_(x, y, 0.25),
    "mul_": lambda x, y, z: torch._foreach_mul_(x, torch.tensor(0.9)),
    "pow_": lambda x, y, z: torch._foreach_pow_(x, [2, 3]),
    "sqrt_": lambda x, y, z: torch._foreach_sqrt_(x),
    "sub_": lambda x, y, z: torch._foreach_sub_(x, y),
    "zero_": lambda x, y, z: torch._foreach_zero_(x),
}


def in_twos(tensors: list[Tensor]) -> tuple[list[Tensor], ...]:
    return tensors[:2], tensors[2:4], tensors[4:]


@pytest.mark.parametrize("run", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_an_operation_on_lists_does_to_each_tensor_what_it_does_to_plain_ones(run):
    lists = in_twos(list(map(bit_centering(), U, E)))
    results = run(*lists)
    for part, plain in (
        (lambda x: x.offset, [u.clone() for u in U]),
        (lambda x: x.value, [u + e for u, e in zip(U, E, strict=True)]),
    ):
        plain_lists = in_twos(plain)
        expected = run(*plain_lists)
        if expected is None:  # in place
            results, expected = lists[0], plain_lists[0]
        for computed, true in zip(results, expected, strict=True):
            torch.testing.assert_close(part(computed), true, rtol=1e-12, atol=1e-14)


def test_each_result_of_an_operation_on_lists_is_rounded_once_as_the_plain_operation_rounds_it():
    make = bit_centering("fp8_e4m3", "near")
    x, y = list(map(make, U[:2], E[:2])), list(map(make, U[2:4], E[2:4]))
    for a, b, result in zip(x, y, torch._foreach_mul(x, y), strict=True):
        assert torch.equal(result.delta, (a * b).delta)
        assert torch.equal(result.delta, halp.quantize(result.delta, "fp8_e4m3", scale="auto"))


def test_plain_tensors_in_a_list_beside_bit_centered_ones_are_constants():
    x = bit_centering()(U[0], E[0])
    plain, centered = torch._foreach_mul([U[1], x], [U[2], U[3]])
    assert torch.equal(plain, U[1] * U[2])
    torch.testing.assert_close(centered.delta, E[0] * U[3])


def test_autograd_goes_through_operations_on_lists():
    x = [bit_centering()(u, e).requires_grad_() for u, e in zip(U[:2], E[:2], strict=True)]
    sum(y.sum() for y in torch._foreach_mul(x, x)).backward()
    for u, e, a in zip(U, E, x, strict=False):
        torch.testing.assert_close(a.grad.offset, 2 * u)
        torch.testing.assert_close(a.grad.delta, 2 * e)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("norm", [1, 2, torch.inf])
def test_the_norm_of_gradients_is_refused_in_lists_too(norm, foreach):
    model = centered_model("void")
    loss_of(model).backward()
    with pytest.raises(NotImplementedError, match=r"clip_grad_norm_.*max_norm"):
        utils.clip_grad_norm_(model.parameters(), 1.0, norm, foreach=foreach)


def test_an_operation_on_lists_without_a_rule_names_the_plain_operation():
    with pytest.raises(NotImplementedError, match=r"aten\.lgamma\.default has no delta rule"):
        torch._foreach_lgamma(list(map(bit_centering(), U, E)))


def test_a_list_of_plain_tensors_cannot_swallow_deltas():
    plain = [torch.ones(3, 4, dtype=torch.float64) for _ in U]
    with pytest.raises(RuntimeError, match="plain"):
        torch._foreach_copy_(plain, list(map(bit_centering(), U, E)))
    assert all(torch.equal(t, torch.ones_like(t)) for t in plain)


def model_of(seed: int = 0) -> nn.Module:
    """Return a network with a dead unit, whose weights never have a gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[0].bias[0] = -100
    return model


def centered_model(rounding: str, offsets: str = "on-site") -> nn.Module:
    """Return that network bit-centered, with deltas."""
    model = halp.bit_center(model_of(), rounding=rounding, offsets=offsets)
    for p in model.parameters():
        z = 1e-2 * torch.randn_like(p.delta)
        p.delta.copy_(z if rounding == "void" else halp.quantize(z, "fp16", scale="auto"))
    return model


def plain_copy(model: nn.Module) -> nn.Module:
    copy = model_of()
    with torch.no_grad():
        for plain, p in zip(copy.parameters(), model.parameters(), strict=True):
            plain.copy_(halp.value(p))
    return copy


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(INPUTS), LABELS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model).backward()
        optimizer.step()


OFFSETS = pytest.mark.parametrize("offsets", ["on-site", "cached"])
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "NAdam": {},
    "Adamax": {},
}


@OFFSETS
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_a_bit_centered_model_as_it_moves_a_plain_one(name, foreach, offsets):
    model = centered_model("void", offsets)
    plain = plain_copy(model)
    for m, how in ((plain, False), (model, foreach)):
        train(m, getattr(torch.optim, name)(m.parameters(), foreach=how, **OPTIMIZERS[name]))
    for p, true in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(halp.value(p), true.detach(), rtol=1e-9, atol=1e-12)


def test_an_optimizer_that_works_on_lists_gives_the_same_bits():
    models = []
    for foreach in (False, True):
        models.append(centered_model("near"))
        train(models[-1], torch.optim.Adam(models[-1].parameters(), lr=0.01, foreach=foreach))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a.offset, b.offset)
        assert torch.equal(a.delta, b.delta)


@OFFSETS
def test_gradients_that_are_zeroed_in_place_accumulate_anew(offsets):
    """Also in inner steps with cached offsets."""

    def deltas_with(set_to_none: bool) -> list[Tensor]:
        model = centered_model("void", offsets)
        optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.1, T=3)

        def closure(*_: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model)
            loss.backward()
            return loss

        optimizer.snapshot([(INPUTS, LABELS)], closure)
        for p in model.parameters():
            torch.manual_seed(p.numel())
            p.delta.copy_(1e-3 * torch.randn_like(p.delta))
        for _ in range(2):
            closure()
        return [p.grad.delta.clone() for p in model.parameters()]

    deltas = deltas_with(set_to_none=False), deltas_with(set_to_none=True)
    for computed, true in zip(*deltas, strict=True):
        torch.testing.assert_close(computed, true, rtol=1e-5, atol=1e-9)


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "swa": {"avg_fn": swa_utils.get_swa_avg_fn()},
    "swa of lists": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "ema of lists": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
}


@OFFSETS
@pytest.mark.parametrize("how", AVERAGES.values(), ids=AVERAGES.keys())
def test_a_running_average_of_a_model_in_training_is_that_of_its_values(how, offsets):
    model = centered_model("void", offsets)
    plain = plain_copy(model)
    average, expected = (swa_utils.AveragedModel(m, **how) for m in (model, plain))
    optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.1, T=3)

    def closure(*_: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(5):
        if optimizer.snapshot_due:
            optimizer.snapshot([(INPUTS, LABELS)], closure)
        optimizer.step(closure)
        with torch.no_grad():
            for p, value in zip(plain.parameters(), plain_copy(model).parameters(), strict=True):
                p.copy_(value)
        average.update_parameters(model)
        expected.update_parameters(plain)
    for p, true in zip(average.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(halp.value(p), true.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(average(INPUTS).value, expected(INPUTS).detach())


def test_an_average_taken_by_hand_between_cached_steps_disturbs_none_of_them():
    def closure(*_: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    ends = []
    for averages in (False, True):
        torch.manual_seed(0)
        model = centered_model("near", "cached")
        optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.1, T=4)
        optimizer.snapshot([(INPUTS, LABELS)], closure)
        with torch.no_grad():
            shadow = [p.detach().clone() for p in model.parameters()]
        for _ in range(4):
            optimizer.step(closure)
            if averages:
                with torch.no_grad():
                    for s, p in zip(shadow, model.parameters(), strict=True):
                        s.mul_(0.5).add_(0.5 * p)
        ends.append([p.delta.clone() for p in model.parameters()])
        moved = [bool(s.delta.any()) for s in shadow]
        assert all(moved) == averages
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_roots_and_powers_of_zero_do_not_change_where_zero_does_not():
    """Averages of squared gradients are zero where a unit is dead."""
    zero = torch.zeros(3, dtype=torch.float64)
    x = bit_centering()(zero, torch.tensor([0.0, 0.25, 0.0], dtype=torch.float64))
    for root in (torch.sqrt, lambda x: x**0.5, lambda x: x**1.5):
        torch.testing.assert_close(root(x).value, root(x.value))


def test_every_in_place_operation_writes_what_the_plain_one_of_its_arguments_computes():
    """``pow_.Scalar`` is in place what ``pow.Tensor_Scalar`` is, not ``pow.Scalar``."""
    x = bit_centering()(U[0], E[0])
    x.pow_(2)
    torch.testing.assert_close(x.value, (U[0] + E[0]) ** 2)


def test_vectors_of_parameters_are_bit_centered_and_not_written_back_by_data():
    model = centered_model("void")
    vector = utils.parameters_to_vector(model.parameters())
    values = torch.cat([halp.value(p).flatten() for p in model.parameters()])
    torch.testing.assert_close(halp.value(vector), values)
    with pytest.raises(RuntimeError, match=r"write p\.data\.copy_\(t\)"):
        utils.vector_to_parameters(values, model.parameters())


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_are_clipped_by_value_at_offset_and_full_value(foreach):
    model = centered_model("void")
    plain = plain_copy(model)
    for m in (model, plain):
        loss_of(m).backward()
        utils.clip_grad_value_(m.parameters(), 0.05, foreach=foreach)
    for p, true in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.value, true.grad)
