"""Claims about the training loop, with a solver that only keeps a diary, and with real ones."""

import time

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

import halp
from halp.data import IGNORED, Batches, load_digits
from halp.models import LogisticRegression, LSTMTagger
from halp.training import Measures, train

NOTHING = Measures(1.0, 2.0, 3.0, 0.5)


class Diary:
    """Writes down what the loop asks for; a snapshot is due every ``period`` steps."""

    def __init__(self, period: int | None):
        self.period = period
        self.since = period
        self.entries = []

    @property
    def snapshot_due(self):
        return self.period is not None and self.since >= self.period

    def zero_grad(self, set_to_none=True):
        pass

    def snapshot(self, loader, closure, weight):
        self.since = 0
        self.weight = weight
        self.entries.append("snapshot")

    def step(self, closure):
        if self.period is not None:
            self.since += 1
        self.entries.append("step")
        return closure()


def run(optimizer, epochs=2, rows=10, batch_size=4, **options):
    torch.manual_seed(0)
    batches = Batches(torch.randn(rows, 5), torch.randint(0, 3, (rows,)), batch_size)
    options = {"measure": lambda: NOTHING} | options
    model = LogisticRegression(5, 3)
    return list(train(model, optimizer, batches, cross_entropy, epochs=epochs, **options))


def test_a_step_is_taken_for_each_batch_and_snapshots_come_exactly_when_due():
    diary = Diary(period=4)
    run(diary, epochs=2)
    s = "step"
    assert diary.entries == ["snapshot", s, s, s, s, "snapshot", s, s]


def test_solvers_without_an_outer_loop_get_no_snapshot():
    diary = Diary(period=None)
    run(diary, epochs=1)
    assert diary.entries == ["step"] * 3


def test_there_is_a_record_before_training_and_after_every_epoch():
    records = run(Diary(None), epochs=3)
    assert [r.epoch for r in records] == [0, 1, 2, 3]
    assert records[0].seconds == 0
    assert all(r.seconds > 0 for r in records[1:])
    assert (records[2].train_loss, records[2].grad_norm) == (1.0, 2.0)
    assert (records[2].test_loss, records[2].test_accuracy) == (3.0, 0.5)


@pytest.mark.parametrize("every, epochs", [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (7, [0, 5])])
def test_measuring_less_often_still_measures_the_first_and_the_last(every, epochs):
    records = run(Diary(None), epochs=5, measure_every=every)
    assert [r.epoch for r in records] == epochs


def test_no_epochs_leave_the_record_of_the_untrained_model():
    assert [r.epoch for r in run(Diary(None), epochs=0)] == [0]


def test_seconds_leave_measuring_out():
    def slow():
        time.sleep(0.3)
        return NOTHING

    assert all(r.seconds < 0.25 for r in run(Diary(None), epochs=2, measure=slow))


def test_after_step_is_called_once_a_step():
    calls = []
    run(Diary(period=2), epochs=2, after_step=lambda: calls.append(1))
    assert len(calls) == 6


def test_after_epoch_is_called_with_each_epoch_before_it_is_measured():
    calls = []
    run(
        Diary(None),
        epochs=3,
        after_epoch=calls.append,
        measure=lambda: calls.append("measure") or NOTHING,
        measure_every=2,
    )
    assert calls == ["measure", 1, 2, "measure", 3, "measure"]


def test_a_batch_weighs_as_many_as_its_labels_that_count():
    diary = Diary(period=2)
    run(diary, epochs=1)
    labels = torch.tensor([[1, 2, IGNORED], [0, IGNORED, IGNORED]])
    assert diary.weight((torch.zeros(2, 3), labels)) == 3


def test_the_full_gradient_of_padded_sentences_is_that_of_their_words():
    torch.manual_seed(0)
    words, tags = torch.randint(0, 9, (5, 4)), torch.randint(0, 3, (5, 4))
    for row, length in enumerate((4, 1, 2, 4, 3)):
        tags[row, length:] = IGNORED
    model = LSTMTagger(9, 3, embedding=4, hidden=5).double()
    optimizer = halp.optim.SVRG(model.parameters(), lr=0.0, T=100)
    batches = Batches(words, tags, 2)
    list(train(model, optimizer, batches, cross_entropy, epochs=1, measure=lambda: NOTHING))
    loss = cross_entropy(model(words), tags)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(optimizer.state[p]["full_gradient"], gradient)


def test_training_puts_the_model_into_train_mode():
    torch.manual_seed(0)
    batches = Batches(torch.randn(4, 5), torch.randint(0, 3, (4,)), 2)
    model = LogisticRegression(5, 3).eval()
    list(train(model, Diary(None), batches, cross_entropy, epochs=1, measure=lambda: NOTHING))
    assert model.training


def test_sgd_through_the_loop_is_sgd_by_hand():
    torch.manual_seed(0)
    inputs, labels = torch.randn(10, 5), torch.randint(0, 3, (10,))
    batches = Batches(inputs, labels, 4)
    model, twin = LogisticRegression(5, 3), LogisticRegression(5, 3)
    twin.load_state_dict(model.state_dict())
    optimizer = halp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    list(train(model, optimizer, batches, cross_entropy, epochs=3, measure=lambda: NOTHING))
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        for first in (0, 4, 8):
            reference.zero_grad()
            cross_entropy(twin(inputs[first : first + 4]), labels[first : first + 4]).backward()
            reference.step()
    torch.testing.assert_close(model.linear.weight, twin.linear.weight)
    torch.testing.assert_close(model.linear.bias, twin.linear.bias)


@pytest.mark.parametrize("shuffle", [False, True])
def test_svrg_through_the_loop_is_svrg_by_numpy(shuffle):
    """Softmax regression on digits with a short last batch and a period of more than an epoch."""
    data = load_digits().first(50).to("cpu", torch.float64)
    rate, period, epochs, batch_size = 0.2, 9, 3, 7
    x, y = data.train_inputs.numpy(), numpy.eye(10)[data.train_labels.numpy()]
    torch.manual_seed(0)
    model = LogisticRegression(64, 10).double()
    batches = Batches(data.train_inputs, data.train_labels, batch_size, shuffle=shuffle, seed=4)
    optimizer = halp.optim.SVRG(model.parameters(), lr=rate, T=period)

    def gradient(w, rows):
        logits = x[rows] @ w
        p = numpy.exp(logits - logits.max(1, keepdims=True))
        return x[rows].T @ (p / p.sum(1, keepdims=True) - y[rows]) / len(rows)

    x = numpy.hstack([x, numpy.ones((50, 1))])
    w = torch.cat([model.linear.weight, model.linear.bias[:, None]], 1).detach().numpy().T.copy()
    generator = torch.Generator().manual_seed(4)
    step = 0
    for _ in range(epochs):
        order = torch.randperm(50, generator=generator) if shuffle else torch.arange(50)
        for rows in order.split(batch_size):
            if step % period == 0:
                center, full = w.copy(), gradient(w, numpy.arange(50))
            rows = rows.numpy()
            w = w - rate * (gradient(w, rows) - gradient(center, rows) + full)
            step += 1

    list(train(model, optimizer, batches, cross_entropy, epochs=epochs, measure=lambda: NOTHING))
    trained = torch.cat([model.linear.weight, model.linear.bias[:, None]], 1).detach().numpy().T
    numpy.testing.assert_allclose(trained, w, rtol=0, atol=1e-13)
