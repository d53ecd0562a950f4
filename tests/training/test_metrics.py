"""Claims about the measured quantities, against closed formulas and scikit-learn's optimum."""

import copy
import math

import numpy
import pytest
import sklearn.linear_model
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import halp
from halp.data import IGNORED, Batches, crop_and_flip, load_digits, trim_padding
from halp.models import LogisticRegression, LSTMTagger
from halp.training import measure, measure_test, measure_training

LAMBDA = 0.01


def toy(rows: int = 10, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 5, generator=random, dtype=dtype)
    return inputs, torch.randint(0, 3, (rows,), generator=random)


def softmax_regression(model, inputs, labels, weight_decay):
    """Regularized loss and gradient of softmax regression, by NumPy in float64."""
    weight = model.linear.weight.detach().double().numpy()
    bias = model.linear.bias.detach().double().numpy()
    x, y = inputs.double().numpy(), labels.numpy()
    logits = x @ weight.T + bias
    shifted = logits - logits.max(1, keepdims=True)
    log_p = shifted - numpy.log(numpy.exp(shifted).sum(1, keepdims=True))
    squares = (weight**2).sum() + (bias**2).sum()
    loss = -log_p[numpy.arange(len(y)), y].mean() + weight_decay / 2 * squares
    error = (numpy.exp(log_p) - numpy.eye(len(weight))[y]) / len(y)
    gradient = numpy.concatenate(
        [(error.T @ x + weight_decay * weight).ravel(), error.sum(0) + weight_decay * bias]
    )
    return loss, numpy.linalg.norm(gradient)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 100])
def test_loss_and_gradient_do_not_depend_on_how_the_data_is_cut(batch_size):
    inputs, labels = toy()
    torch.manual_seed(1)
    model = LogisticRegression(5, 3).double()
    measured = measure_training(
        model, Batches(inputs, labels, batch_size), cross_entropy, weight_decay=LAMBDA
    )
    expected = softmax_regression(model, inputs, labels, LAMBDA)
    assert measured == pytest.approx(expected, rel=1e-13)


def test_a_plain_model_is_measured_in_its_own_dtype():
    inputs, labels = toy()
    model = LogisticRegression(5, 3)
    measured = measure_training(
        model, Batches(inputs, labels, 4), cross_entropy, weight_decay=LAMBDA, dtype=torch.float64
    )
    assert measured == pytest.approx(softmax_regression(model, inputs, labels, LAMBDA), rel=1e-6)


def test_scikit_learns_optimum_of_the_digits_has_the_known_loss_and_no_gradient():
    data = load_digits().to("cpu", torch.float64)
    rows = len(data.train_labels)
    with_ones = numpy.hstack([data.train_inputs.numpy(), numpy.ones((rows, 1))])
    solution = sklearn.linear_model.LogisticRegression(
        C=1 / (LAMBDA * rows), fit_intercept=False, solver="newton-cg", tol=1e-12, max_iter=1000
    ).fit(with_ones, data.train_labels.numpy())
    model = LogisticRegression(64, 10).double()
    coefficients = torch.from_numpy(solution.coef_)
    with torch.no_grad():
        model.linear.weight.copy_(coefficients[:, :-1])
        model.linear.bias.copy_(coefficients[:, -1])
    loss, grad_norm = measure_training(
        model,
        Batches(data.train_inputs, data.train_labels, 8),
        cross_entropy,
        weight_decay=LAMBDA,
    )
    assert loss == pytest.approx(0.7422233385, abs=1e-10)
    assert grad_norm < 1e-7


@pytest.mark.parametrize("batch_size", [3, 100])
def test_test_loss_and_accuracy_are_means_over_samples(batch_size):
    inputs, labels = toy()
    model = LogisticRegression(5, 3).double()
    loss, accuracy = measure_test(model, Batches(inputs, labels, batch_size), cross_entropy)
    logits = model(inputs).detach()
    assert loss == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-13)
    assert accuracy == (logits.argmax(1) == labels).sum().item() / 10


def test_measure_gathers_all_four():
    inputs, labels = toy()
    train, test = Batches(inputs[:7], labels[:7], 2), Batches(inputs[7:], labels[7:], 2)
    model = LogisticRegression(5, 3).double()
    measures = measure(model, train, test, cross_entropy, weight_decay=LAMBDA)
    assert (measures.train_loss, measures.grad_norm) == measure_training(
        model, train, cross_entropy, weight_decay=LAMBDA
    )
    assert (measures.test_loss, measures.test_accuracy) == measure_test(model, test, cross_entropy)


def test_frozen_parameters_are_no_part_of_the_objective():
    inputs, labels = toy()
    model = LogisticRegression(5, 3).double()
    model.linear.bias.requires_grad_(False)
    batches = Batches(inputs, labels, 4)
    loss, grad_norm = measure_training(model, batches, cross_entropy, weight_decay=LAMBDA)
    weight = model.linear.weight.detach().clone().requires_grad_()
    objective = cross_entropy(inputs @ weight.T + model.linear.bias, labels)
    objective = objective + LAMBDA / 2 * weight.square().sum()
    objective.backward()
    assert loss == pytest.approx(objective.item(), rel=1e-13)
    assert grad_norm == pytest.approx(weight.grad.norm().item(), rel=1e-12)


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = self.first

        def forward(self, inputs):
            return self.second(self.first(inputs).tanh())

    inputs, labels = toy()
    model = Tied().double()
    loss, grad_norm = measure_training(
        model, Batches(inputs[:, :3], labels, 4), cross_entropy, weight_decay=LAMBDA
    )
    weight = model.first.weight.detach().clone().requires_grad_()
    objective = cross_entropy((inputs[:, :3] @ weight.T).tanh() @ weight.T, labels)
    objective = objective + LAMBDA / 2 * weight.square().sum()
    objective.backward()
    assert loss == pytest.approx(objective.item(), rel=1e-13)
    assert grad_norm == pytest.approx(weight.grad.norm().item(), rel=1e-12)


def test_a_diverged_model_measures_as_not_a_number():
    inputs, labels = toy()
    model = LogisticRegression(5, 3).double()
    with torch.no_grad():
        model.linear.weight.fill_(math.nan)
    loss, grad_norm = measure_training(model, Batches(inputs, labels, 4), cross_entropy)
    assert math.isnan(loss) and math.isnan(grad_norm)


def noisy_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    return model.double()


def test_training_loss_is_measured_in_train_mode_and_test_loss_in_evaluation_mode():
    inputs, labels = toy()
    batches = Batches(inputs, labels, 10)
    model = noisy_model().eval()
    torch.manual_seed(5)
    loss, _ = measure_training(model, batches, cross_entropy)
    test_loss, _ = measure_test(model.train(), batches, cross_entropy)

    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    assert loss == pytest.approx(cross_entropy(twin.train()(inputs), labels).item(), rel=1e-13)
    twin = copy.deepcopy(model)
    assert test_loss == pytest.approx(cross_entropy(twin.eval()(inputs), labels).item(), rel=1e-13)


def test_measuring_leaves_everything_as_it_was():
    inputs, labels = toy()
    batches = Batches(inputs, labels, 4)
    model = noisy_model()
    model[1].eval()
    cross_entropy(model(inputs), labels).backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    parameters = list(model.parameters())
    torch.manual_seed(3)
    random_state = torch.get_rng_state()

    measure(model, batches, batches, cross_entropy, weight_decay=LAMBDA)

    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model] == [True, False, True, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for kept, parameter in zip(parameters, model.parameters(), strict=True):
        assert kept is parameter
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_modes_and_buffers_are_restored_after_an_error_too():
    inputs, labels = toy()
    model = noisy_model().eval()
    state = copy.deepcopy(model.state_dict())
    failing = [(inputs, labels), (inputs[:, :2], labels)]
    with pytest.raises(RuntimeError):
        measure_training(model, failing, cross_entropy)
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_bit_centered_model_is_measured_at_offset_plus_delta_and_stays_bit_centered():
    inputs, labels = toy(dtype=torch.float32)
    batches = Batches(inputs, labels, 4)
    torch.manual_seed(0)
    model = halp.bit_center(LogisticRegression(5, 3), offset_dtype=torch.float64)
    optimizer = halp.optim.BitCenterSVRG(model.parameters(), lr=0.1, T=5)

    def loss_of(x, y):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.snapshot(batches, loss_of)
    for x, y in batches:
        optimizer.step(lambda x=x, y=y: loss_of(x, y))
    measured = measure_training(
        model, batches, cross_entropy, weight_decay=LAMBDA, dtype=torch.float64
    )
    with halp.materialize(model, dtype=torch.float64):
        expected = softmax_regression(model, inputs, labels, LAMBDA)
    assert measured == pytest.approx(expected, rel=1e-13)
    for parameter in model.parameters():
        assert type(parameter) is not nn.Parameter


def sentences():
    torch.manual_seed(0)
    words, tags = torch.randint(0, 9, (7, 5)), torch.randint(0, 3, (7, 5))
    for row, length in enumerate((5, 1, 2, 3, 1, 1, 4)):
        tags[row, length:] = IGNORED
    return LSTMTagger(9, 3, embedding=4, hidden=5).double(), words, tags


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
@pytest.mark.parametrize("transform", [None, trim_padding])
def test_only_labels_that_count_are_measured(batch_size, transform):
    model, words, tags = sentences()
    batches = Batches(words, tags, batch_size, transform=transform)
    loss, grad_norm = measure_training(model, batches, cross_entropy, weight_decay=LAMBDA)
    test_loss, accuracy = measure_test(model, batches, cross_entropy)

    counting = tags != IGNORED
    logits = model(words).transpose(1, 2)[counting]  # (17, 3)
    mean = cross_entropy(logits, tags[counting])
    penalty = LAMBDA / 2 * sum(p.square().sum() for p in model.parameters())
    gradient = torch.autograd.grad(mean + penalty, list(model.parameters()))
    squares = sum(float(g.square().sum()) for g in gradient)
    assert loss == pytest.approx((mean + penalty).item(), rel=1e-12)
    assert grad_norm == pytest.approx(math.sqrt(squares), rel=1e-12)
    assert test_loss == pytest.approx(mean.item(), rel=1e-12)
    assert accuracy == (logits.argmax(1) == tags[counting]).sum().item() / 17


def test_measuring_leaves_the_order_and_the_augmentation_of_later_batches_as_they_were():
    images, labels = torch.randn(6, 1, 8, 8), torch.arange(6) % 3
    measured, twin = (
        Batches(images, labels, 2, shuffle=True, seed=3, transform=crop_and_flip) for _ in range(2)
    )
    measure(LogisticRegression(64, 3), measured, measured, cross_entropy)
    for (left, _), (right, _) in zip(measured, twin, strict=True):
        assert torch.equal(left, right)


def test_a_bit_centered_models_running_statistics_are_taken_in_the_dtype_it_is_measured_in():
    inputs, labels = toy(dtype=torch.float32)
    batches = Batches(inputs, labels, 10)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model(inputs)
    twin = copy.deepcopy(model).double()
    halp.bit_center(model, offset_dtype=torch.float64)
    buffers = list(model.buffers())
    before = [buffer.clone() for buffer in buffers]
    measured = measure(model, batches, batches, cross_entropy, dtype=torch.float64)
    expected = measure(twin, batches, batches, cross_entropy)
    assert measured == expected
    for buffer, kept, value in zip(model.buffers(), buffers, before, strict=True):
        assert buffer is kept and torch.equal(buffer, value)
