"""Each delta rule gives f(u + e) − f(u) to the arithmetic's roundoff, however small e is.

Without rounding to a format, unless said otherwise: what is tested are the formulas. The truth is
computed with 100 decimal digits.
"""

import zlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import halp
from halp.bitcenter import BitCenteredTensor, dispatch
from halp.bitcenter.offsets import Context
from halp.precision import Precision
from tests.bitcenter import decimals
from tests.bitcenter.arithmetic_cases import BROADCAST, PRODUCTS, Rule
from tests.bitcenter.rule_cases import DECOMPOSED, RULES

SCALES = [10.0, 1.0, 1e-1, 1e-3, 1e-6, 1e-12, 1e-30]
RELATIVE_ERROR = {torch.float32: 1e-5, torch.float64: 1e-9}
DTYPES = pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
BINARY = [rule for rule in BROADCAST + PRODUCTS if len(rule.domains) == 2]


def by_name(rules: list[Rule]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rule", rules, ids=str)


def draw(rule: Rule, scale: float, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return the operands' offsets and deltas, the same in every run."""
    torch.manual_seed(zlib.crc32(f"{rule.name} {scale}".encode()))
    offsets, deltas = zip(*(domain.draw(scale, dtype) for domain in rule.domains), strict=True)
    return list(offsets), list(deltas)


def bit_centering(
    format: str = "fp16", rounding: str = "void"
) -> Callable[[Tensor, Tensor], BitCenteredTensor]:
    """Return a function that makes bit-centered tensors of one context."""
    context = Context(Precision(format, rounding, "auto"))
    return lambda u, e: BitCenteredTensor(u.clone(), e.clone(), context)


def assert_right(rule: Rule, delta: Tensor, offsets: list[Tensor], deltas: list[Tensor]) -> None:
    """Compare with the truth; say which element is worst."""
    true = decimals.change(rule.truth, offsets, deltas)
    assert type(delta) is Tensor
    assert delta.shape == true.shape
    assert delta.dtype == offsets[0].dtype
    tolerance = RELATIVE_ERROR[delta.dtype]
    bound = tolerance * (true.abs() if rule.elementwise else true.abs().max().expand_as(true))
    if len(deltas) == 1 and rule.elementwise:
        (u,), (e,) = offsets, deltas
        if rule.flat_somewhere:
            bound = bound + tolerance * e.abs()
        size = torch.maximum(rule.run(u).abs(), rule.run(u + e).abs())
        bound = bound + torch.where(e.abs() > 1, 0.1 * tolerance * size, 0)
    bound = bound + torch.finfo(delta.dtype).tiny * tolerance
    excess = ((delta.double() - true).abs() / bound).nan_to_num(nan=torch.inf).flatten()
    if excess.max() > 1:
        worst = excess.argmax()
        message = f"{delta.flatten()[worst]:.9e} instead of {true.flatten()[worst]:.9e}"
        if rule.elementwise and len(deltas) == 1:
            message += f" for u = {u.flatten()[worst]:.9e}, e = {e.flatten()[worst]:.9e}"
        pytest.fail(f"element {worst}: {message}")


@DTYPES
@by_name(RULES + DECOMPOSED)
def test_delta_of_the_result_is_right_however_small_the_deltas(rule, dtype):
    for scale in SCALES:
        offsets, deltas = draw(rule, scale, dtype)
        result = rule.run(*map(bit_centering(), offsets, deltas))
        if rule in RULES:
            assert torch.equal(result.offset, rule.run(*offsets))
        else:
            torch.testing.assert_close(result.offset, rule.run(*offsets))
        assert_right(rule, result.delta, offsets, deltas)


@pytest.mark.parametrize("plain", [0, 1], ids=["left", "right"])
@by_name(BINARY)
def test_a_plain_operand_on_either_side_is_a_constant(rule, plain):
    for scale in SCALES:
        offsets, deltas = draw(rule, scale, torch.float32)
        operands = list(map(bit_centering(), offsets, deltas))
        operands[plain] = offsets[plain]
        deltas[plain] = torch.zeros_like(deltas[plain])
        result = rule.run(*operands)
        assert torch.equal(result.offset, rule.run(*offsets))
        assert_right(rule, result.delta, offsets, deltas)


#: Their results move by |u| roundoffs, here 9, if u moves by one.
ILL_CONDITIONED = {"exp", "expm1", "sin", "cos"}


@by_name(RULES)
def test_in_fp16_the_error_is_some_roundoffs_at_every_size(rule):
    for scale in (1e-1, 1e-4, 1e-8, 1e-20):
        offsets, deltas = draw(rule, scale, torch.float32)
        context = Context(Precision("fp16", "near", "auto"))
        deltas = [context.rounder(e) for e in deltas]
        pairs = zip(offsets, deltas, strict=True)
        result = rule.run(*(BitCenteredTensor(u, e, context) for u, e in pairs))
        true = decimals.change(rule.truth, offsets, deltas)
        roundoffs = ((result.delta - true).norm() / true.norm()).item() * 2**11
        assert roundoffs <= (12 if rule.name in ILL_CONDITIONED else 3), f"at a scale of {scale}"


def test_log_softmax_of_confident_rows_is_right_for_every_class():
    """The sum over classes would cancel if deltas were not relative to the likeliest class's."""
    torch.manual_seed(0)
    u = 30 * torch.randn(40, 10)
    for scale in (1e-2, 1e-5, 1e-8, 1e-20):
        e = scale * torch.randn(40, 10)
        for run, truth in (
            (torch.log_softmax, decimals.log_softmax),
            (torch.softmax, decimals.softmax),
        ):
            delta = run(bit_centering()(u, e), 1).delta
            true = decimals.change(lambda x, f=truth: f(x, 1), [u], [e])
            assert ((delta - true).abs() <= 1e-5 * true.abs() + 1e-42).all()


@pytest.mark.parametrize("scale", [1e-2, 1e-5, 1e-8])
def test_squared_errors_much_smaller_than_the_outputs_are_right(scale):
    """The residual of rounded outputs and targets would be all rounding error."""
    torch.manual_seed(0)
    outputs = 1 + torch.rand(64)
    targets = outputs + 1e-4 * torch.randn(64)
    e = halp.quantize(scale * torch.randn(64), "fp16", scale="auto")
    x = bit_centering("fp16", "near")(outputs, e)
    loss = torch.nn.functional.mse_loss(x, targets, reduction="none")
    true = e.double() * (2 * (outputs.double() - targets.double()) + e.double())
    assert (loss.delta - true).norm() <= 1e-3 * true.norm()


@pytest.mark.parametrize("change", [10.0, 80.0, 100.0, 1000.0])
def test_log_softmax_is_right_however_much_the_logits_change(change):
    """As they do when features are not scaled: exp of the change overflows from 88 on."""
    u = torch.tensor([[0.0, -1.0, 2.0], [5.0, -change, 0.0], [3.0, 2.0, 1.0]])
    e = torch.tensor([[0.0, change, 1.0], [0.0, 2 * change, 0.0], [-change, 1.0, 2.0]])
    x = bit_centering()(u, e).requires_grad_()
    y = x.log_softmax(1)
    true = decimals.change(lambda x: decimals.log_softmax(x, 1), [u], [e])
    torch.testing.assert_close(y.delta.double(), true, rtol=1e-5, atol=1e-5)
    true = decimals.change(lambda x: decimals.softmax(x, 1), [u], [e])
    torch.testing.assert_close(x.softmax(1).delta.double(), true, rtol=1e-5, atol=1e-5)
    y[:, 0].sum().backward()
    torch.testing.assert_close(x.grad.delta[:, 1:].double(), -true[:, 1:], rtol=1e-5, atol=1e-5)


#: Rules that eager code on a CPU does not reach.
ONLY_COMPILED = {torch.ops.aten.native_dropout_backward.default}


def test_every_rule_has_a_case(monkeypatch):
    """Run the table, forward and backward, and look which of the registered rules it reached."""
    reached = set()
    for op, handler in list(dispatch.HANDLERS.items()):

        def reach(func, *arguments, handler=handler):
            reached.add(func)
            return handler(func, *arguments)

        monkeypatch.setitem(dispatch.HANDLERS, op, reach)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), "CompositeImplicitAutograd"
        )  # PyTorch itself takes it apart, unless it compiles
        if composite or not is_rule(handler):
            reached.add(op)
    for rule in RULES:
        operands, _ = draw(rule, 1.0, torch.float32)
        make = bit_centering()
        result = rule.run(*(make(u, u).requires_grad_() for u in operands))
        if rule.differentiable:
            result.square().sum().backward()
    missing = dispatch.HANDLERS.keys() - reached - ONLY_COMPILED
    assert not missing, f"no case in rule_cases.py runs {sorted(map(str, missing))}"


def is_rule(handler: Callable) -> bool:
    """Whether a handler came from ``register_rule``, and not from ``register_handler``."""
    return handler.__qualname__.startswith("_handler_of")
