"""Claims about training that is killed and goes on, through a plain loop."""

import itertools
import os
import random
import re
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import halp
from halp.data import Batches
from halp.training import Checkpointer, CheckpointError, Stopped
from halp.training.durable import DamagedError, read_sealed, unsealed, write_sealed, write_whole
from tests.rarely import rarely_but
from tests.training.states import assert_same, files, newest

ROWS, BATCH, EPOCHS = 22, 4, 3  # six batches an epoch, the last of them short
PAGE = Path(__file__).resolve().parents[2] / "docs" / "resume.md"

SOLVERS = {
    "sgd": halp.optim.SGD,
    "lp-sgd": halp.optim.LPSGD,
    "svrg": halp.optim.SVRG,
    "lp-svrg": halp.optim.LPSVRG,
    "bc-sgd": halp.optim.BitCenterSGD,
    "bc-svrg": halp.optim.BitCenterSVRG,
}


class Killed(BaseException):
    """The end of a process, as far as a test without processes can have one."""


class Noisy(Dataset):
    """Draws from all random generators whenever a sample is asked for."""

    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        noise = torch.randn(5) + random.random() + float(numpy.random.random())
        return self.inputs[index] + 0.1 * noise, self.labels[index]


def data():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(ROWS, 5, generator=generator)
    return inputs, torch.randint(0, 3, (ROWS,), generator=generator)


def jittered(inputs, labels, generator):
    return inputs + 0.1 * torch.randn(inputs.shape, generator=generator), labels


LOADERS = {
    "in order": lambda: Batches(*data(), BATCH),
    "shuffled": lambda: Batches(*data(), BATCH, shuffle=True, seed=3),
    "augmented": lambda: Batches(*data(), BATCH, shuffle=True, transform=jittered),
    "a list": lambda: list(Batches(*data(), BATCH)),
    "DataLoader": lambda: DataLoader(TensorDataset(*data()), BATCH, shuffle=True),
    "DataLoader with its generator": lambda: DataLoader(
        TensorDataset(*data()), BATCH, shuffle=True, generator=torch.Generator().manual_seed(2)
    ),
    "noisy DataLoader": lambda: DataLoader(Noisy(*data()), BATCH, shuffle=True),
    "DataLoader with workers": lambda: DataLoader(
        Noisy(*data()), BATCH, shuffle=True, num_workers=2
    ),
}


class Training:
    """A small training: what a script would set up, and its loop."""

    def __init__(self, folder, solver="bc-svrg", rounding="near", loader="shuffled", **options):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        self.model = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        keywords = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
        if solver.startswith("bc"):
            halp.bit_center(self.model, "fp16", rounding, seed=7)
        elif solver.startswith("lp"):
            keywords |= {"format": "fp16", "rounding": rounding, "seed": 7}
        if solver.endswith("svrg") or solver == "bc-sgd":
            keywords |= {"T": 4, "buffers": self.model.buffers()}
        self.optimizer = SOLVERS[solver](self.model.parameters(), **keywords)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.2, total_steps=100, cycle_momentum=False
        )
        self.loader = LOADERS[loader]()
        self.said: list[str] = []
        self.checkpointer = Checkpointer(
            folder,
            self.model,
            self.optimizer,
            self.loader,
            say=self.said.append,
            scheduler=self.scheduler,
            **{"every": 1, **options},
        )
        self.losses: list[float] = []

    def loss_of(self, x, y):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        return loss

    def run(self, epochs=EPOCHS, die_after=None):
        for _ in self.checkpointer.epochs(epochs):
            self.model.train()
            for x, y in self.checkpointer.batches():
                if len(self.losses) == die_after:
                    raise Killed
                if self.optimizer.snapshot_due:
                    self.optimizer.snapshot(self.loader, self.loss_of)
                loss = self.optimizer.step(lambda x=x, y=y: self.loss_of(x, y))
                self.losses.append(float(loss))
            self.scheduler.step()
        return self.losses


def undisturbed(folder, **options):
    training = Training(folder, **options)
    training.run()
    return training


def killed_and_resumed(folder, die_after, **options):
    """Train, die in the middle of step ``die_after``, and go on in another process, as it were."""
    with pytest.raises(Killed):
        Training(folder, **options).run(die_after=die_after)
    torch.manual_seed(99), random.seed(99), numpy.random.seed(99)
    training = Training(folder, **options)
    assert training.checkpointer.restore()
    training.run()
    return training


@pytest.mark.parametrize("die_after", [9, 12])
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "solver, rounding",
    rarely_but(
        [("sgd", "near"), ("lp-svrg", "stoc"), ("bc-svrg", "stoc")],
        itertools.product(SOLVERS, ["near", "stoc"]),
    ),
)
def test_a_killed_training_ends_with_the_bits_of_the_undisturbed_one(
    tmp_path, solver, rounding, die_after
):
    """Mid-cycle, mid-epoch and at an epoch's end; batch norm, dropout, momentum, a schedule."""
    options = {"solver": solver, "rounding": rounding}
    whole = undisturbed(tmp_path / "whole", **options)
    resumed = killed_and_resumed(tmp_path / "killed", die_after, **options)
    assert resumed.losses == whole.losses[die_after:]
    assert_same(newest(tmp_path / "killed"), newest(tmp_path / "whole"))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("die_after", rarely_but([9], [4, 9]))
def test_any_loader_is_brought_back_to_its_place(tmp_path, loader, die_after):
    whole = undisturbed(tmp_path / "whole", loader=loader)
    resumed = killed_and_resumed(tmp_path / "killed", die_after, loader=loader)
    assert resumed.losses == whole.losses[die_after:]
    assert_same(newest(tmp_path / "killed"), newest(tmp_path / "whole"))


def test_the_loaders_of_these_tests_are_different_every_epoch(tmp_path):
    """Or they would show nothing."""
    training = Training(tmp_path, loader="DataLoader with workers")
    first, second = list(training.loader), list(training.loader)
    assert not torch.equal(first[0][0], second[0][0])


@pytest.mark.parametrize("every", [2, 5, 6, 100])
def test_the_last_checkpoint_before_the_end_is_gone_on_from(tmp_path, every):
    whole = undisturbed(tmp_path / "whole", every=every)
    with pytest.raises(Killed):
        Training(tmp_path / "killed", every=every).run(die_after=11)
    training = Training(tmp_path / "killed", every=every)
    assert training.checkpointer.restore() == (every < 11)
    done = 10 // every * every
    assert training.checkpointer.steps == done
    assert training.run() == whole.losses[done:]


def test_a_checkpoint_after_epochs_comes_after_all_that_belongs_to_the_epoch(tmp_path):
    with pytest.raises(Killed):
        Training(tmp_path, every=None, every_epochs=2).run(die_after=16)
    training = Training(tmp_path)
    assert training.checkpointer.restore()
    assert (training.checkpointer.epoch, training.checkpointer.batch) == (2, 0)
    assert training.scheduler.last_epoch == 2


def test_a_finished_training_has_nothing_left_to_do_and_can_be_made_longer(tmp_path):
    whole = Training(tmp_path / "whole")
    whole.run(epochs=EPOCHS + 2)
    Training(tmp_path / "short").run()
    training = Training(tmp_path / "short")
    training.checkpointer.restore()
    before = [(path, path.stat().st_mtime_ns) for path in files(tmp_path / "short")]
    assert training.run() == []
    assert [(path, path.stat().st_mtime_ns) for path in files(tmp_path / "short")] == before
    assert training.run(epochs=EPOCHS + 2) == whole.losses[-12:]


def test_killed_and_resumed_again_and_again(tmp_path):
    whole = undisturbed(tmp_path / "whole", rounding="stoc")
    losses, deaths = [], 0
    for _ in range(9):
        training = Training(tmp_path / "killed", rounding="stoc")
        training.checkpointer.restore()
        try:
            training.run(die_after=2)
        except Killed:
            deaths += 1
        losses += training.losses
    assert deaths == 8
    assert losses == whole.losses


def test_checkpoints_change_no_number(tmp_path):
    assert Training(None).run() == Training(tmp_path, every=1).run()


def test_the_last_two_are_kept_and_the_newest_is_of_the_end(tmp_path):
    undisturbed(tmp_path, every=5)
    assert [path.name for path in files(tmp_path)] == ["step-000000015.pt", "step-000000018.pt"]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in files(tmp_path)}


def test_a_loader_with_fewer_batches_than_were_trained_on_is_refused(tmp_path):
    with pytest.raises(Killed):
        Training(tmp_path, loader="a list").run(die_after=5)
    training = Training(tmp_path, loader="a list")
    del training.loader[3:]
    training.checkpointer.restore()
    with pytest.raises(CheckpointError, match="after 5 batches .* the loader has only 3"):
        training.run()


@pytest.mark.parametrize("before, after", [("shuffled", "in order"), ("in order", "shuffled")])
def test_a_loader_with_other_generators_is_refused(tmp_path, before, after):
    undisturbed(tmp_path, loader=before)
    with pytest.raises(CheckpointError, match="is of another training: .* generators of a loader"):
        Training(tmp_path, loader=after).checkpointer.restore()


def test_another_solver_and_other_parts_are_refused(tmp_path):
    undisturbed(tmp_path, solver="svrg")
    with pytest.raises(CheckpointError, match="SVRG cannot be loaded into LPSVRG"):
        Training(tmp_path, solver="lp-svrg").checkpointer.restore()
    with pytest.raises(
        CheckpointError, match="the Checkpointer has a 'ema', which the state lacks"
    ):
        Training(tmp_path, solver="svrg", ema=nn.Linear(1, 1)).checkpointer.restore()


def test_a_second_training_into_the_folder_of_another_is_refused_and_harms_nothing(tmp_path):
    undisturbed(tmp_path)
    before = {path.name: path.read_bytes() for path in files(tmp_path)}
    for harm in (Training(tmp_path).run, Training(tmp_path).checkpointer.save):
        with pytest.raises(CheckpointError, match="holds the checkpoints of another training"):
            harm()
    assert {path.name: path.read_bytes() for path in files(tmp_path)} == before


def test_a_state_that_could_not_be_read_back_is_refused_before_it_is_written(tmp_path):
    class Odd:
        def state_dict(self):
            return {"time": numpy.datetime64("2020-01-01")}

        def load_state_dict(self, state):
            pass

    training = Training(tmp_path, odd=Odd())
    with pytest.raises(CheckpointError, match="the state of 'odd' holds more than tensors"):
        training.run()
    assert files(tmp_path) == []


def stop_in_step(number, training):
    def stop_if_it_is(optimizer, args, kwargs):
        if len(training.losses) == number - 1:
            training.checkpointer.stop()

    training.optimizer.register_step_pre_hook(stop_if_it_is)


def test_stop_ends_after_the_step_with_a_checkpoint(tmp_path):
    whole = undisturbed(tmp_path / "whole")
    training = Training(tmp_path / "stopped", every=None)
    stop_in_step(8, training)
    with pytest.raises(Stopped, match="after 8 steps"):
        training.run()
    resumed = Training(tmp_path / "stopped", every=None)
    resumed.checkpointer.restore()
    assert resumed.run() == whole.losses[8:]


def test_stopped_before_the_first_step_it_starts_from_there(tmp_path):
    whole = undisturbed(tmp_path / "whole")
    training = Training(tmp_path / "stopped")
    training.checkpointer.stop()
    with pytest.raises(Stopped):
        training.run()
    resumed = Training(tmp_path / "stopped")
    assert resumed.checkpointer.restore()
    assert resumed.run() == whole.losses


def test_save_outside_of_epochs_and_not_inside(tmp_path):
    training = Training(tmp_path, every=None)
    training.checkpointer.save()
    assert [path.name for path in files(tmp_path)] == ["step-000000000.pt"]
    for _ in training.checkpointer.epochs(1):
        for call in (training.checkpointer.save, training.checkpointer.state_dict):
            with pytest.raises(RuntimeError, match="in the middle of an epoch"):
                call()


def test_batches_belong_into_epochs_once(tmp_path):
    checkpointer = Training(tmp_path).checkpointer
    with pytest.raises(RuntimeError, match=r"batches\(\) belongs inside"):
        next(checkpointer.batches())
    for _ in checkpointer.epochs(1):
        list(checkpointer.batches())
        with pytest.raises(RuntimeError, match="once an epoch"):
            list(checkpointer.batches())


@pytest.mark.parametrize("option", ["every", "every_epochs"])
def test_an_interval_below_one_is_refused(tmp_path, option):
    with pytest.raises(ValueError, match=f"{option} must be at least 1 or None, not 0"):
        Training(tmp_path, **{option: 0})


def test_a_state_dict_goes_through_torch_save_without_a_folder(tmp_path):
    whole = Training(None)
    whole.run()
    training = Training(None)
    stop_in_step(9, training)
    with pytest.raises(Stopped):
        training.run()
    torch.save(training.checkpointer.state_dict(), tmp_path / "mine.pt")
    resumed = Training(None)
    resumed.checkpointer.load_state_dict(torch.load(tmp_path / "mine.pt", weights_only=True))
    assert resumed.checkpointer.steps == 9
    assert resumed.run() == whole.losses[9:]


def test_random_state_of_every_kind_comes_back():
    state = halp.optim.preserve.RandomState([torch.Generator()]).state_dict()
    numbers = torch.rand(3), random.gauss(0, 1), numpy.random.standard_normal(3)
    halp.optim.preserve.RandomState.from_state_dict(state, [torch.Generator()]).restore()
    assert torch.equal(torch.rand(3), numbers[0])
    assert random.gauss(0, 1) == numbers[1]
    assert (numpy.random.standard_normal(3) == numbers[2]).all()


# Files.


def test_every_flipped_byte_and_every_length_is_noticed(tmp_path):
    """Of a small file; all of its bytes."""
    path = tmp_path / "file"
    write_sealed(path, bytes(range(256)))
    whole = path.read_bytes()
    assert bytes(read_sealed(path)) == bytes(range(256))
    damages = [
        whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(len(whole))
    ]
    damages += [whole[:i] for i in range(len(whole))] + [whole + b"\n", b"\0" + whole, whole * 2]
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(DamagedError):
            read_sealed(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    undisturbed(folder, every=5)
    return {path.name: path.read_bytes() for path in files(folder)}


def with_files(folder, contents):
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def test_a_flipped_byte_anywhere_in_the_newest_checkpoint_is_noticed(finished):
    name = max(finished)
    assert len(unsealed(finished[name])) > 10_000
    damaged = bytearray(finished[name])
    for position in range(len(damaged)):
        damaged[position] ^= 1 << position % 8
        with pytest.raises(DamagedError):
            unsealed(bytes(damaged))
        damaged[position] ^= 1 << position % 8


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content + b"\0",
        lambda content: content[:5000] + b"\xff" + content[5001:],
        lambda content: bytes(len(content)),
    ],
    ids=["torn", "empty", "longer", "flipped", "zeros"],
)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(
    tmp_path, finished, damage
):
    older, newer = sorted(finished)
    with_files(tmp_path, finished | {newer: damage(finished[newer])})
    training = Training(tmp_path, every=5)
    assert training.checkpointer.restore()
    assert training.checkpointer.steps == 15
    (line,) = training.said
    assert re.fullmatch(rf"{newer} is damaged \(.*\): going on from the one before, {older}", line)
    training.run()
    assert newest(tmp_path)["steps"] == 18
    assert [path.name for path in files(tmp_path)] == [older, newer]


def test_a_damaged_checkpoint_does_not_count_as_one_of_the_two(tmp_path, finished):
    older, newer = sorted(finished)
    with_files(tmp_path, finished | {newer: b"damaged"})
    training = Training(tmp_path, every=1)
    training.checkpointer.restore()
    with pytest.raises(Killed):
        training.run(die_after=1)
    assert [path.name for path in files(tmp_path)] == [older, "step-000000016.pt"]


def test_two_damaged_checkpoints_are_an_error_that_says_what_to_do(tmp_path, finished):
    with_files(tmp_path, dict.fromkeys(finished, b"damaged"))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* move them away to start"):
        Training(tmp_path).checkpointer.restore()


def test_what_a_killed_writer_left_is_removed(tmp_path, finished):
    with_files(tmp_path, finished | {".step-000000020.pt.unfinished": b"half"})
    Training(tmp_path).checkpointer.restore()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(finished)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, failing):
    def fail(*_):
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_checkpoint_that_cannot_be_written_is_a_sentence_with_the_file(tmp_path, monkeypatch):
    training = Training(tmp_path, every=2)
    with pytest.raises(Killed):
        training.run(die_after=3)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    resumed = Training(tmp_path, every=2)
    resumed.checkpointer.restore()
    with pytest.raises(
        CheckpointError, match=r"step-000000004.pt cannot be written: No space left"
    ):
        resumed.run()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002.pt"]


def test_the_example_of_the_page_on_resuming_runs_and_resumes(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert capsys.readouterr().out.count("epoch") == 4
    exec(example.replace("epochs(4)", "epochs(5)"), {})
    assert capsys.readouterr().out.startswith("epoch 4: ")
