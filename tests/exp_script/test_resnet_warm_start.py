"""Claims about runs that save checkpoints and runs that start from them, on digits."""

import json

import pytest
import torch

import halp
import run_models
from run_models import main
from settings import parse
from tables import SOLVERS

SMALL = (
    "--model=resnet --resnet-width=4 --limit-train=32 --batch-size=16 --alpha=0.02 "
    "--momentum=0.9 --reg=1e-3"
).split()
EPOCHS = 2


def rows(folder) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key != "seconds"}
        for line in lines
    ]


def saving(folder, *argv) -> list[str]:
    where = ["--resnet-save-ckpt", f"--resnet-save-ckpt-path={folder}"]
    return [*SMALL, f"--n-epochs={EPOCHS}", "--solver=lp-sgd", *where, *argv]


def loading(folder, *argv, epoch=EPOCHS) -> list[str]:
    where = [f"--resnet-save-ckpt-path={folder}", f"--resnet-load-ckpt-epoch-id={epoch}"]
    return [*SMALL, "--n-epochs=1", "--resnet-load-ckpt", *where, *argv]


def run(tmp_path, argv, name="out") -> list[dict]:
    assert main([*argv, f"--output={tmp_path / name}"]) == 0
    return rows(tmp_path / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of checkpoints that lp-sgd saved, and its metrics."""
    folder = tmp_path_factory.mktemp("saved")
    return folder / "checkpoints", run(folder, saving(folder / "checkpoints"))


@pytest.fixture
def started(monkeypatch):
    """Collects model and solver of every run as it is about to train."""
    found = []

    def train(model, optimizer, *args, **kwargs):
        buffers = {
            name: optimizer.state[p]["momentum_buffer"].clone()
            for name, p in model.named_parameters()
            if "momentum_buffer" in optimizer.state.get(p, {})
        }
        found.append((model, optimizer, buffers))
        return halp.training.train(model, optimizer, *args, **kwargs)

    monkeypatch.setattr(run_models, "train", train)
    return found


def content(folder, epoch=EPOCHS) -> dict:
    return torch.load(folder / f"resnet-epoch-{epoch}.pt", weights_only=True)


def test_the_first_and_the_last_epoch_are_saved(saved):
    folder, _ = saved
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["resnet-epoch-1.pt", f"resnet-epoch-{EPOCHS}.pt"]


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_starts_where_the_saving_run_ended(saved, tmp_path, started, solver):
    folder, before = saved
    after = run(tmp_path, loading(folder, f"--solver={solver}"))
    for key in ("train_loss", "grad_norm", "test_loss", "test_accuracy"):
        assert after[0][key] == pytest.approx(before[-1][key], rel=1e-6)
    assert after[1]["train_loss"] < after[0]["train_loss"]
    ((model, _, buffers),) = started
    momentum = content(folder)["momentum"]
    assert set(buffers) == set(momentum) == {name for name, _ in model.named_parameters()}
    for name, held in buffers.items():
        expected = momentum[name]
        if SOLVERS[solver].bit_centered:
            expected = halp.quantize(expected, "fp16", scale="auto")
        assert torch.equal(held, expected), name


@pytest.mark.parametrize("solver", ["sgd", "bc-svrg"])
def test_an_epoch_in_the_middle_is_one_to_start_from(saved, tmp_path, solver):
    folder, before = saved
    after = run(tmp_path, loading(folder, f"--solver={solver}", epoch=1))
    assert after[0]["train_loss"] == pytest.approx(before[1]["train_loss"], rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sgd_goes_on_as_if_it_had_never_stopped(tmp_path, dtype):
    """Weights, running statistics and momentum: nothing else carries over an epoch."""
    flags = [*SMALL, "--solver=sgd", f"--offset-dtype={dtype}"]
    whole = run(tmp_path, [*flags, "--n-epochs=3"], "whole")
    where = [f"--resnet-save-ckpt-path={tmp_path / 'c'}"]
    run(tmp_path, [*flags, "--n-epochs=2", "--resnet-save-ckpt", *where], "first")
    load = ["--resnet-load-ckpt", "--resnet-load-ckpt-epoch-id=2", *where]
    rest = run(tmp_path, [*flags, "--n-epochs=1", *load], "rest")
    assert [row | {"epoch": row["epoch"] + 2} for row in rest] == whole[2:]


def test_shuffled_and_augmented_runs_carry_over_too(tmp_path):
    random = ["--shuffle", "--augment"]
    before = run(tmp_path, saving(tmp_path / "c", *random), "before")
    after = run(tmp_path, loading(tmp_path / "c", *random, "--solver=svrg"), "after")
    assert after[0] | {"epoch": EPOCHS} == before[-1]


def test_without_momentum_the_checkpoints_is_left_out(saved, tmp_path, started):
    run(tmp_path, loading(saved[0], "--solver=sgd", "--momentum=0"))
    ((_, _, buffers),) = started
    assert buffers == {}


def test_the_run_says_what_made_the_checkpoint(saved, tmp_path, capsys):
    run(tmp_path, loading(saved[0], "--solver=sgd"))
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("sgd on digits, resnet")
    assert second.startswith(
        f"starts from epoch {EPOCHS}: resnet (width 4, input channels 1, classes 10), made with "
        f"solver lp-sgd, format fp16, rounding near, dataset digits, seed 0, epoch {EPOCHS}, "
        f"learning rate 0.02, momentum 0.9, halp "
    )


@pytest.mark.parametrize("solver", SOLVERS)
def test_fine_tuning_moves_the_last_layer_only(saved, tmp_path, started, solver):
    folder, _ = saved
    after = run(tmp_path, loading(folder, f"--solver={solver}", "--resnet-fine-tune"))
    assert after[1]["train_loss"] < after[0]["train_loss"]
    ((model, _, buffers),) = started
    assert set(buffers) == {"fc.weight", "fc.bias"}
    start = content(folder)["model"]
    moved = {name for name, t in model.state_dict().items() if not torch.equal(t, start[name])}
    assert moved == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("drops, rates", [("1 3", [1, 1, 0.1, 0.1, 0.01]), ("", [1] * 5)])
def test_the_learning_rate_drops_after_the_epochs_given(tmp_path, started, drops, rates):
    folder = tmp_path / "c"
    epochs = ["--n-epochs=4", "--resnet-save-epochs", *"1234", "--resnet-lr-drops", *drops.split()]
    run(tmp_path, saving(folder, *epochs, "--alpha=0.5", "--limit-train=8", "--measure-every=9"))
    saved_rates = [content(folder, epoch)["origin"]["learning rate"] for epoch in (1, 2, 3, 4)]
    assert saved_rates == pytest.approx([0.5 * rate for rate in rates[1:]])
    ((_, optimizer, _),) = started
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * rates[-1])


def test_any_solver_drops_its_learning_rate(tmp_path, started):
    flags = ["--solver=bc-svrg", "--n-epochs=1", "--resnet-lr-drops", "1", "--limit-train=8"]
    run(tmp_path, [*SMALL, *flags])
    assert started[0][1].param_groups[0]["lr"] == pytest.approx(0.002)


def test_a_run_loads_from_and_saves_into_one_folder(tmp_path):
    folder = tmp_path / "c"
    run(tmp_path, saving(folder, "--solver=sgd", "--limit-train=8"), "before")
    both = ["--resnet-save-ckpt", "--resnet-save-epochs", "3", "--n-epochs=3", "--limit-train=8"]
    run(tmp_path, loading(folder, "--solver=sgd", *both), "after")
    assert len(list(folder.iterdir())) == 3


def test_a_run_loads_from_one_folder_and_saves_into_another(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run(tmp_path, saving(first, "--solver=sgd", "--limit-train=8"), "before")
    flags = loading(first, "--solver=sgd", "--limit-train=8", "--resnet-save-ckpt")
    flags += [f"--resnet-save-ckpt-path={second}", f"--resnet-load-ckpt-path={first}"]
    run(tmp_path, flags, "after")
    assert {path.name for path in second.iterdir()} <= {path.name for path in first.iterdir()}


def test_what_a_person_should_know_is_said_before_training(saved, tmp_path, capsys):
    folder, _ = saved
    flags = loading(folder, "--solver=svrg", "--momentum=0", "--resnet-fine-tune")
    assert main([*flags, f"--output={tmp_path / 'out'}"]) == 0
    out = capsys.readouterr().out
    assert "the checkpoint's momentum is left out, since --momentum is 0" in out
    assert "only the last layer trains; all else is frozen, in evaluation mode" in out


# What is refused: in one sentence, before training, with nothing written.


def mistake(capsys, argv) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line.removeprefix("run_models.py: error: ")


def test_an_existing_checkpoint_is_refused_before_training(saved, tmp_path, capsys):
    folder, _ = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    output = tmp_path / "out"
    message = mistake(capsys, saving(folder, f"--output={output}"))
    assert message == (
        f"{folder / 'resnet-epoch-1.pt'} exists already and is not overwritten: save into another "
        "folder, or move the file away"
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not output.exists()


def test_a_missing_epoch_is_told_which_are_there(saved, capsys):
    message = mistake(capsys, loading(saved[0], epoch=300))
    assert message.endswith(
        f"has no resnet checkpoint of epoch 300: there are those of 1, {EPOCHS}"
    )


def test_another_width_is_told_the_flag(saved, capsys):
    message = mistake(capsys, loading(saved[0], "--resnet-width=8"))
    assert message == (
        "the checkpoint holds a resnet (width 4, input channels 1, classes 10), but this run has "
        "width 8: use --resnet-width=4"
    )


def test_another_number_of_classes_is_told_the_flag(saved, capsys):
    message = mistake(capsys, loading(saved[0], "--n-classes=12"))
    assert message.endswith("but this run has classes 12: use --n-classes=10")


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, capsys):
    (tmp_path / "resnet-epoch-2.pt").write_text("nothing of the kind")
    assert "is no checkpoint of halp" in mistake(capsys, loading(tmp_path))


def test_a_diverged_checkpoint_is_refused(tmp_path, capsys):
    flags = ["--solver=sgd", "--alpha=1e30", "--limit-train=8", "--on-overflow=warn"]
    assert main(saving(tmp_path / "c", *flags)) == 0
    capsys.readouterr()
    assert "holds NaN or infinity" in mistake(capsys, loading(tmp_path / "c"))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in mistake(capsys, saving(tmp_path / "file" / "c"))


def test_only_epochs_that_the_run_reaches_are_saved():
    settings = parse([*saving("folder"), "--n-epochs=320"])
    assert settings.resnet_save_epochs == (1, 300, 320)
    assert settings.resnet_lr_drops == (150, 250)
    assert parse(saving("folder")).resnet_save_epochs == (1, EPOCHS)
    settings = parse([*saving("folder"), "--resnet-save-epochs", "2", "1", "9"])
    assert settings.resnet_save_epochs == (1, 2)
