"""The outer step: an exact full gradient, from loaders that give one, without a trace elsewhere."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import halp
from tests.optim.runs import (
    BIT_CENTERED,
    VARIANCE_REDUCED,
    WITH_SNAPSHOTS,
    Run,
    assert_close,
    assert_identical,
    linear,
    mlp,
    regression,
)

FP16 = {"format": "fp16", "rounding": "near"}

each_solver = pytest.mark.parametrize("solver", VARIANCE_REDUCED)


def data(n: int = 10, dtype=torch.float64) -> TensorDataset:
    (batch,) = regression(dtype, sizes=(n,))
    return TensorDataset(*batch)


def full_gradients(run: Run) -> list[torch.Tensor]:
    """g̃ as the inner steps read it."""
    return [run.optimizer.state[p]["full_gradient"] for p in run.model.parameters()]


def by_hand(run: Run, dataset, weights=None) -> list[torch.Tensor]:
    """Gradient of ``Σ c_i (w·x_i + b − y_i)² / 2 Σ c_i``, written out, in float64."""
    x, y = (t.double() for t in dataset.tensors)
    c = torch.ones(len(x)) if weights is None else weights
    w, b = (v.double() for v in run.values)
    residual = c.double() * (x @ w[0] + b - y) / c.sum()
    return [(residual @ x)[None], residual.sum()[None]]


# The full gradient.


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 100])
@each_solver
def test_full_gradient_does_not_depend_on_how_the_data_is_cut(solver, batch_size):
    """10 samples: most of these leave a short last batch."""
    run = Run(solver, linear(), [])
    run.snapshot(DataLoader(data(), batch_size))
    assert_close(full_gradients(run), by_hand(run, data()), 1e-14)


@each_solver
def test_full_gradient_of_unequal_batches_in_a_list(solver):
    x, y = data().tensors
    run = Run(solver, linear(), [])
    run.snapshot(list(zip(x.split([1, 6, 3]), y.split([1, 6, 3]), strict=True)))
    assert_close(full_gradients(run), by_hand(run, data()), 1e-14)


@each_solver
def test_snapshot_returns_the_mean_loss_at_the_snapshot(solver):
    run = Run(solver, linear(), [])
    loss = run.snapshot(DataLoader(data(), 4))
    x, y = data().tensors
    expected = 0.5 * (x @ run.values[0][0] + run.values[1] - y).square().mean()
    assert loss == pytest.approx(expected.item(), rel=1e-14)


@pytest.mark.parametrize("solver", ["LPSVRG", "BitCenterSVRG"])
def test_full_gradient_is_computed_in_high_precision_and_rounded_once(solver):
    """Within one roundoff of the float64 gradient, which fp16 arithmetic would miss by far."""
    run = Run(solver, linear(), [], precision=FP16)
    run.snapshot(DataLoader(data(1000), 1))
    for found, exact in zip(full_gradients(run), by_hand(run, data(1000)), strict=True):
        expected = halp.quantize(exact, "fp16", scale="auto" if solver in BIT_CENTERED else None)
        assert torch.equal(found, expected)
        assert not torch.equal(found, exact)


def test_full_gradient_is_summed_in_float64_even_of_a_float32_model():
    """What is stored is the float64 sum rounded to float32, not a sum of float32 gradients."""
    precision = {"rounding": "void", "offset_dtype": torch.float64}
    dataset = data(1000, torch.float32)
    run = Run("BitCenterSVRG", linear(torch.float32), [], precision=precision)
    run.snapshot(DataLoader(dataset, 7))
    assert_identical(full_gradients(run), [g.float() for g in by_hand(run, dataset)])


def test_full_gradient_after_some_steps_is_at_the_new_center():
    run = Run("BitCenterSVRG", linear(), list(DataLoader(data(), 4)), precision=FP16).steps(5)
    before = run.values
    run.snapshot(DataLoader(data(), 4))
    assert_identical(run.values, before)
    assert_identical([p.offset for p in run.model.parameters()], before)
    assert all(not p.delta.any() for p in run.model.parameters())
    assert_close(full_gradients(run), by_hand(run, data()), 2**-11)


@each_solver
def test_weight_decay_is_once_in_the_first_step(solver):
    """Whether it sits in g̃ or in the update: the step from w̃ is −lr·(∇f_b + λw̃ …)."""
    plain = Run(solver, linear(), [tuple(data().tensors)], lr=0.1)
    decayed = Run(solver, linear(), [tuple(data().tensors)], lr=0.1, weight_decay=0.5)
    start = plain.values
    moves = [plain.steps(1).values, decayed.steps(1).values]
    expected = [w - 0.1 * 0.5 * s for w, s in zip(moves[0], start, strict=True)]
    assert_close(moves[1], expected, 1e-14)


@each_solver
def test_a_closure_may_return_nothing(solver):
    batches = list(DataLoader(data(), 4))
    silent, other = (Run(solver, linear(), batches, precision=FP16) for _ in range(2))
    returning = silent.closure

    def closure(*batch):
        returning(*batch)

    silent.closure = closure
    assert silent.snapshot() is None and silent.step() is None
    assert_identical(silent.steps(10).values, other.steps(11).values)


# Batches of every kind, and what they count for.


def tokens() -> TensorDataset:
    """Sequences of 5 steps, of which a mask leaves 1 to 5: the loss is a mean over tokens."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(10, 5, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(10, 5, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([5, 1, 3, 2, 5, 4, 1, 1, 2, 5])
    return TensorDataset(x, y, torch.arange(5) < lengths[:, None])


def token_loss(model, x, y, mask):
    squares = 0.5 * (model(x).squeeze(-1) - y).square() * mask
    return squares.sum() / mask.sum()


@pytest.mark.parametrize("batch_size", [1, 3, 10])
@each_solver
def test_weight_counts_tokens_instead_of_samples(solver, batch_size):
    run = Run(solver, linear(features=3), [], loss=token_loss)
    run.optimizer.snapshot(
        DataLoader(tokens(), batch_size), run.closure, weight=lambda batch: batch[2].sum()
    )
    x, y, mask = tokens().tensors
    flat = TensorDataset(x.reshape(-1, 3), y.reshape(-1))
    assert_close(full_gradients(run), by_hand(run, flat, weights=mask.reshape(-1)), 1e-14)


@each_solver
def test_without_weight_a_mean_over_tokens_counts_by_samples(solver):
    """The default is a count of samples, which is another objective here: weight matters."""
    run = Run(solver, linear(features=3), [], loss=token_loss)
    run.snapshot(DataLoader(tokens(), 3))
    x, y, mask = tokens().tensors
    flat = TensorDataset(x.reshape(-1, 3), y.reshape(-1))
    right = by_hand(run, flat, weights=mask.reshape(-1))
    assert (full_gradients(run)[0] - right[0]).norm() > 1e-2


def as_dicts(batch_size: int) -> list[dict]:
    return [{"inputs": x, "targets": y} for x, y in DataLoader(data(), batch_size)]


class Supervised(TensorDataset):
    """One tensor a sample: the target is its last column."""

    def __init__(self) -> None:
        x, y = data().tensors
        super().__init__(torch.cat([x, y[:, None]], 1))

    def __getitem__(self, index):
        return self.tensors[0][index]


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "tensor"])
@each_solver
def test_batches_may_be_tuples_lists_dicts_or_tensors(solver, kind):
    run = Run(solver, linear(), [])

    def closure(*batch, **named):
        if kind == "dict":
            return run.closure(named["inputs"], named["targets"])
        if kind == "tensor":
            return run.closure(batch[0][:, :-1], batch[0][:, -1])
        return run.closure(*batch)

    loader = {
        "tuple": [tuple(batch) for batch in DataLoader(data(), 4)],
        "list": [list(batch) for batch in DataLoader(data(), 4)],
        "dict": as_dicts(4),
        "tensor": DataLoader(Supervised(), 4),
    }[kind]
    run.optimizer.snapshot(loader, closure)
    assert_close(full_gradients(run), by_hand(run, data()), 1e-14)


@each_solver
def test_the_weight_of_a_dict_is_the_length_of_its_first_tensor(solver):
    run = Run(solver, linear(), [])
    run.optimizer.snapshot(as_dicts(3), lambda inputs, targets: run.closure(inputs, targets))
    assert_close(full_gradients(run), by_hand(run, data()), 1e-14)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
@each_solver
def test_a_weight_that_is_no_count_is_refused(solver, weight):
    run = Run(solver, linear(), [])
    with pytest.raises(ValueError, match=r"weight of batch 0 .* not"):
        run.optimizer.snapshot(DataLoader(data(), 4), run.closure, weight=lambda batch: weight)


@each_solver
def test_a_batch_without_a_length_asks_for_weight(solver):
    run = Run(solver, linear(), [])
    with pytest.raises(ValueError, match="pass snapshot.*weight="):
        run.optimizer.snapshot([3, 4], lambda batch: None)


# Loaders that would not give the full gradient, or lose the caller's place.


def with_sampler(sampler, **options) -> DataLoader:
    return DataLoader(data(), 4, sampler=sampler, **options)


class HalfIterated:
    """A loader with persistent workers of which two batches have been taken."""

    def __init__(self) -> None:
        self.loader = DataLoader(data(), 2, num_workers=1, persistent_workers=True)
        self.iterator = iter(self.loader)
        next(self.iterator)
        next(self.iterator)


REFUSED = {
    "replacement": (
        lambda: with_sampler(RandomSampler(data(), replacement=True)),
        "RandomSampler draws with replacement",
    ),
    "replacement-in-a-batch-sampler": (
        lambda: DataLoader(
            data(), batch_sampler=BatchSampler(RandomSampler(data(), replacement=True), 4, False)
        ),
        "RandomSampler draws with replacement",
    ),
    "weighted": (
        lambda: with_sampler(WeightedRandomSampler(torch.ones(10), 10)),
        "WeightedRandomSampler draws with replacement",
    ),
    "too-few": (
        lambda: with_sampler(RandomSampler(data(), num_samples=7)),
        "draws 7 of 10 samples",
    ),
    "too-many": (
        lambda: with_sampler(RandomSampler(data(), num_samples=13)),
        "draws 13 of 10 samples",
    ),
    "drop-last": (lambda: DataLoader(data(), 4, drop_last=True), "drops the last 2 of 10"),
    "drop-last-shuffled": (
        lambda: DataLoader(data(), 3, shuffle=True, drop_last=True),
        "drops the last 1 of 10",
    ),
    "iterator": (lambda: iter(DataLoader(data(), 4)), "got an iterator"),
    "generator": (lambda: (batch for batch in DataLoader(data(), 4)), "got an iterator"),
    "zip": (lambda: zip(*data().tensors, strict=True), "got an iterator"),
    "empty-list": (list, "empty loader"),
    "empty-data": (lambda: DataLoader(TensorDataset(*data()[:0]), 4), "empty loader"),
}


def with_nan(value: float) -> DataLoader:
    dataset = data()
    dataset.tensors[0][9, 2] = value
    return DataLoader(dataset, 4)


@pytest.mark.parametrize("name", [*REFUSED, "nan", "infinity", "persistent-workers"])
@each_solver
def test_refused_in_one_sentence_and_nothing_is_lost(solver, name):
    """In the middle of a cycle: the weights stay, and the next proper snapshot works."""
    half_iterated = HalfIterated() if name == "persistent-workers" else None
    loader, message = {
        **{key: (make, message) for key, (make, message) in REFUSED.items()},
        "nan": (lambda: with_nan(float("nan")), "batch 2 .* NaN"),
        "infinity": (lambda: with_nan(float("inf")), "batch 2 .* infinity"),
        "persistent-workers": (
            lambda: half_iterated.loader,
            "persistent_workers=True in the middle of an iteration",
        ),
    }[name]
    batches = list(DataLoader(data(), 4))
    run, other = (
        Run(solver, linear(), batches, momentum=0.9, precision=FP16).steps(3) for _ in range(2)
    )
    before = run.values
    with pytest.raises(ValueError, match=message) as caught:
        run.snapshot(loader())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert_identical(run.values, before)
    for r in (run, other):
        r.snapshot(DataLoader(data(), 4))
    assert_identical(run.steps(10).values, other.steps(10).values)


def test_a_half_iterated_loader_with_persistent_workers_is_not_disturbed():
    half_iterated = HalfIterated()
    run = Run("SVRG", linear(), [])
    with pytest.raises(ValueError, match="persistent_workers"):
        run.snapshot(half_iterated.loader)
    assert len(list(half_iterated.iterator)) == 3
    run.snapshot(half_iterated.loader)  # its iteration is over
    assert_close(full_gradients(run), by_hand(run, data()), 1e-14)


def test_an_iteration_with_persistent_workers_that_has_just_begun_is_not_disturbed():
    """``iter(loader)`` has been called, and no batch taken yet."""
    loader = DataLoader(data(), 2, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    with pytest.raises(ValueError, match="persistent_workers"):
        Run("SVRG", linear(), []).snapshot(loader)
    assert len(list(iterator)) == 5


def test_persistent_workers_before_an_iteration_are_accepted():
    run = Run("SVRG", linear(), [])
    loader = DataLoader(data(), 4, num_workers=1, persistent_workers=True)
    for _ in range(2):
        run.snapshot(loader)
    assert_close(full_gradients(run), by_hand(run, data()), 1e-14)


class Stream(IterableDataset):
    """Ten samples without a length."""

    def __iter__(self):
        return iter([(x, y) for x, y in zip(*data().tensors, strict=True)])


ACCEPTED = {
    "drop-last-that-drops-nothing": lambda: DataLoader(data(), 5, drop_last=True),
    "shuffle": lambda: DataLoader(data(), 4, shuffle=True),
    "sequential": lambda: with_sampler(SequentialSampler(data())),
    "subset-random-sampler": lambda: with_sampler(SubsetRandomSampler(range(10))),
    "random-sampler": lambda: with_sampler(RandomSampler(data())),
    "batch-sampler": lambda: DataLoader(
        data(), batch_sampler=BatchSampler(RandomSampler(data()), 4, False)
    ),
    "no-batching": lambda: DataLoader(
        [(x[None], y[None]) for x, y in zip(*data().tensors, strict=True)], batch_size=None
    ),
    "workers": lambda: DataLoader(data(), 4, num_workers=1),
    "stream": lambda: DataLoader(Stream(), 4),
    "stream-with-persistent-workers": lambda: DataLoader(
        Stream(), 4, num_workers=1, persistent_workers=True
    ),
    "list": lambda: list(DataLoader(data(), 4)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_loaders_that_visit_each_sample_once_are_accepted(name):
    run = Run("SVRG", linear(), [])
    loader = ACCEPTED[name]()
    for _ in range(2):
        run.snapshot(loader)
    assert_close(full_gradients(run), by_hand(run, data()), 1e-12)


def test_a_subset_random_sampler_gives_the_gradient_of_its_subset():
    run = Run("SVRG", linear(), [])
    run.snapshot(with_sampler(SubsetRandomSampler([1, 3, 4, 8])))
    subset = TensorDataset(*data()[[1, 3, 4, 8]])
    assert_close(full_gradients(run), by_hand(run, subset), 1e-13)


def test_a_stream_that_drops_its_last_batch_is_told_in_a_sentence():
    run = Run("SVRG", linear(), [])
    with pytest.raises(ValueError, match="drop_last"):
        run.snapshot(DataLoader(Stream(), 4, drop_last=True))


def test_bc_sgd_reads_no_loader():
    """Its outer step only recenters."""
    run = Run("BitCenterSGD", linear(), list(DataLoader(data(), 4)), precision=FP16).steps(3)
    before = run.values
    run.snapshot(iter(()))
    assert_identical([p.offset for p in run.model.parameters()], before)


# No trace.


class Noisy(nn.Module):
    """Draws from every global generator, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(0.5)).double()
        self.last = nn.Linear(4, 1).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        hidden = self.net(x)
        if self.training:
            self.calls += 1
            self.mean += halp.value(hidden).mean(0) + random.random() + numpy.random.rand()
        return self.last(hidden)


def random_states(*generators) -> list:
    name, keys, *rest = numpy.random.get_state()
    states = [torch.get_rng_state(), random.getstate(), (name, keys.tolist(), *rest)]
    states += [g.get_state() for g in generators]
    return [s.tolist() if isinstance(s, torch.Tensor) else s for s in states]


def seed_everything() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_snapshot_leaves_random_state_and_buffers_as_they_were(solver):
    seed_everything()
    model = Noisy()
    generators = [torch.Generator().manual_seed(s) for s in range(3)]
    loader = DataLoader(
        data(),
        batch_sampler=BatchSampler(RandomSampler(data(), generator=generators[0]), 4, False),
        generator=generators[1],
    )
    run = Run(solver, model, list(DataLoader(data(), 4)), buffers=model.buffers()).steps(2)
    states, buffers = random_states(*generators), [b.clone() for b in model.buffers()]
    assert buffers[0] > 0
    run.snapshot(loader)
    assert random_states(*generators) == states
    assert_identical(list(model.buffers()), buffers)


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_a_step_moves_buffers_once(solver):
    model = Noisy()
    Run(solver, model, list(DataLoader(data(), 4)), buffers=model.buffers()).steps(12)
    assert model.calls == 12


def batch_norm_net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize("solver", ["SVRG", "LPSVRG"])
def test_running_statistics_are_those_of_the_inner_steps(solver):
    """They move at w once a step, never at w̃ or in a snapshot, as a by-hand pass confirms."""
    batches = list(DataLoader(data(12), 4))
    model = batch_norm_net()
    run = Run(solver, model, batches, buffers=model.buffers())
    mean, variance = torch.zeros(4).double(), torch.ones(4).double()
    for step in range(10):
        if run.optimizer.snapshot_due:
            run.snapshot()
        with torch.no_grad():
            hidden = model[0](batches[step % 3][0])
        mean = 0.9 * mean + 0.1 * hidden.mean(0)
        variance = 0.9 * variance + 0.1 * hidden.var(0)
        run.step()
    assert_close([model[1].running_mean, model[1].running_var], [mean, variance], 1e-12)
    assert model[1].num_batches_tracked == 10


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_snapshot_leaves_gradients_as_they_were(solver):
    """The objects themselves, also None."""
    run = Run(solver, mlp(), list(DataLoader(data(), 4)), precision=FP16).steps(2)
    run.model[0].bias.grad = None
    gradients = [p.grad for p in run.model.parameters()]
    values = [None if g is None else halp.value(g) for g in gradients]
    run.snapshot()
    for p, gradient, value in zip(run.model.parameters(), gradients, values, strict=True):
        assert p.grad is gradient
        if gradient is not None:
            assert torch.equal(halp.value(gradient), value)


@pytest.mark.parametrize("solver", WITH_SNAPSHOTS)
def test_a_shuffling_loader_gives_the_same_order_with_snapshots_inside(solver):
    """Of the very loader that is being iterated."""

    def order(with_snapshots: bool) -> list[list[float]]:
        torch.manual_seed(3)
        loader = DataLoader(data(), 2, shuffle=True)
        run = Run(solver, linear(), [], T=2)
        seen = []
        for _ in range(3):
            for x, _ in loader:
                seen.append(x.flatten().tolist())
                if with_snapshots:
                    run.snapshot(loader)
        return seen

    assert order(with_snapshots=True) == order(with_snapshots=False)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("solver", VARIANCE_REDUCED)
def test_an_exception_in_the_closure_leaves_the_weights_and_a_due_snapshot(solver, failing):
    batches = list(DataLoader(data(), 4))
    run, other = (
        Run(solver, linear(), batches, momentum=0.9, precision=FP16).steps(3) for _ in range(2)
    )
    before, states = run.values, random_states()
    gradients = [p.grad for p in run.model.parameters()]
    calls = iter(range(3))

    def closure(x, y):
        if next(calls) == failing:
            raise KeyboardInterrupt
        torch.rand(3)
        return run.closure(x, y)

    with pytest.raises(KeyboardInterrupt):
        run.optimizer.snapshot(batches, closure)
    assert_identical(run.values, before)
    assert random_states() == states
    assert all(p.grad is g for p, g in zip(run.model.parameters(), gradients, strict=True))
    assert run.optimizer.snapshot_due
    with pytest.raises(RuntimeError, match="needs a snapshot first"):
        run.optimizer.step(lambda: run.closure(*batches[0]))
    for r in (run, other):
        r.snapshot()
    assert_identical(run.steps(10).values, other.steps(10).values)


@pytest.mark.parametrize("solver", VARIANCE_REDUCED)
def test_an_exception_in_the_closure_of_a_step_leaves_the_weights(solver):
    """SVRG is at w̃ when its first evaluation fails."""
    batches = list(DataLoader(data(), 4))
    run = Run(solver, linear(), batches, momentum=0.9, precision=FP16).steps(3)
    before = run.values

    def closure():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step(closure)
    assert_identical(run.values, before)


def test_parameters_outside_the_optimizer_survive_a_snapshot():
    """They collect gradients, which nothing clears, and stand still."""
    run = Run(
        "BitCenterSVRG",
        mlp(),
        list(DataLoader(data(), 4)),
        groups=lambda model: list(model[0].parameters()),
    )
    before = [halp.value(p) for p in run.model[2].parameters()]
    run.steps(10)
    assert_identical([halp.value(p) for p in run.model[2].parameters()], before)
