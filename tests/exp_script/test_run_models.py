"""Claims about whole runs, most of them in-process and small."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

import run_models
import tables
from halp.data import IGNORED, Dataset
from run_models import main
from tables import REPOSITORY, SOLVERS
from tests.rarely import rarely_but

SCRIPT = REPOSITORY / "exp_script" / "run_models.py"
SMALL = ["--n-epochs=2", "--limit-train=64", "--batch-size=16"]
KEYS = {"epoch", "train_loss", "grad_norm", "test_loss", "test_accuracy", "seconds"}


def sentences(columns: int = 6) -> Dataset:
    """Words whose tag is their index modulo 3, in sentences of 1 to 6 words."""
    random = torch.Generator().manual_seed(0)
    words = torch.randint(0, 12, (70, 6), generator=random)
    lengths = torch.randint(1, 7, (70, 1), generator=random)
    tags = torch.where(torch.arange(6) < lengths, words % 3, IGNORED)
    words, tags = pad(words, (0, columns - 6)), pad(tags, (0, columns - 6), value=IGNORED)
    return Dataset("sentences", words[:60], tags[:60], words[60:], tags[60:], 3, n_words=12)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measured(folder: Path) -> list[dict]:
    """The rows without the one quantity that no two runs share."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in metrics(folder)]


def run(folder: Path, *argv: str) -> list[dict]:
    assert main([*SMALL, *argv, f"--output={folder}"]) == 0
    return measured(folder)


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_trains_and_writes_its_metrics(tmp_path, solver):
    assert main([*SMALL, f"--solver={solver}", f"--output={tmp_path}"]) == 0
    rows = metrics(tmp_path)
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert all(set(row) == KEYS for row in rows)
    assert rows[2]["train_loss"] < rows[1]["train_loss"] < rows[0]["train_loss"]
    assert rows[0]["seconds"] == 0 < rows[1]["seconds"]
    assert 0 <= rows[2]["test_accuracy"] <= 1


@pytest.mark.parametrize("solver", ["sgd", "svrg", "bc-svrg"])
@pytest.mark.parametrize("rounding", ["near", "stoc"])
def test_the_same_command_gives_the_same_bits(tmp_path, solver, rounding):
    flags = [f"--solver={solver}", f"--rounding={rounding}", "--shuffle", "--seed=3"]
    assert run(tmp_path / "a", *flags) == run(tmp_path / "b", *flags)


def test_the_seed_decides_initial_values_and_order(tmp_path):
    first = run(tmp_path / "a", "--solver=sgd", "--shuffle", "--seed=1")
    second = run(tmp_path / "b", "--solver=sgd", "--shuffle", "--seed=2")
    assert first[0]["train_loss"] != second[0]["train_loss"]


def test_all_solvers_start_from_the_same_model(tmp_path):
    starts = [run(tmp_path / s, f"--solver={s}", "--offset-dtype=float64")[0] for s in SOLVERS]
    assert all(start == starts[0] for start in starts)


@pytest.mark.parametrize("exact, rounded", [("svrg", "bc-svrg"), ("sgd", "bc-sgd")])
def test_without_rounding_a_bit_centered_solver_is_the_full_precision_one(tmp_path, exact, rounded):
    flags = ["--rounding=void", "--offset-dtype=float64", "--momentum=0.9", "--reg=0.01", "-T=3"]
    expected = run(tmp_path / "exact", f"--solver={exact}", *flags)
    actual = run(tmp_path / "rounded", f"--solver={rounded}", *flags)
    for left, right in zip(expected, actual, strict=True):
        # The deltas are float32.
        assert right["train_loss"] == pytest.approx(left["train_loss"], rel=1e-6)


def test_shuffling_changes_the_order_but_not_the_measured_start(tmp_path):
    in_order = run(tmp_path / "a", "--solver=sgd")
    shuffled = run(tmp_path / "b", "--solver=sgd", "--shuffle")
    assert in_order[0]["train_loss"] == pytest.approx(shuffled[0]["train_loss"], rel=1e-6)
    assert in_order[1]["train_loss"] != shuffled[1]["train_loss"]


def test_measuring_less_often_changes_nothing_else(tmp_path):
    every = run(tmp_path / "a", "--n-epochs=5")
    some = run(tmp_path / "b", "--n-epochs=5", "--measure-every=2")
    assert some == [every[0], every[2], every[4], every[5]]


def test_config_holds_the_resolved_settings_and_versions(tmp_path):
    run(tmp_path, "--solver=bc-svrg", "--rounding=stoc")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["settings"]["T"] == 4  # one epoch of 64 samples in batches of 16
    assert config["settings"]["n_classes"] == 10
    assert config["settings"]["rounding"] == "stoc"
    assert config["settings"]["scale"] == "auto"
    assert config["versions"]["torch"] == torch.__version__


def test_a_diverging_run_that_goes_on_writes_null(tmp_path):
    rows = run(tmp_path, "--solver=sgd", "--alpha=1e38", "--reg=1.0", "--on-overflow=warn")
    assert rows[-1]["train_loss"] is None
    assert len(rows) == 3


def test_one_readable_line_an_epoch_on_stdout(capsys):
    assert main([*SMALL, "--solver=bc-svrg"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("bc-svrg on digits, logreg; 64 training samples, 4 steps an epoch")
    epochs = [line[:9] for line in lines[1:] if not line.startswith("cached offsets: ")]
    assert epochs == ["epoch 0/2", "epoch 1/2", "epoch 2/2"]
    assert re.search(r"train loss \d\.\d+ .*gradient norm \d.* accuracy \d+\.\d+%", lines[-1])


def test_without_output_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(SMALL) == 0
    assert list(tmp_path.iterdir()) == []


def mistake(capsys, *argv: str) -> str:
    """The one sentence that a run which cannot start prints."""
    assert main([*SMALL, *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("run_models.py: error: ")
    return line


def test_wrong_use_is_a_sentence_and_exit_code_2(capsys):
    assert "at least 0, not -1.0" in mistake(capsys, "--alpha=-1")
    assert "--model=mlp is not available" in mistake(capsys, "--model=mlp")


@pytest.mark.parametrize(
    "model, solver",
    rarely_but(
        [("lenet", "bc-svrg"), ("lenet", "lp-sgd"), ("resnet", "svrg")],
        itertools.product(["lenet", "resnet"], SOLVERS),
    ),
)
def test_every_solver_trains_convolutional_nets(tmp_path, model, solver):
    width = ["--resnet-width=4"] if model == "resnet" else []
    rows = run(tmp_path, f"--model={model}", f"--solver={solver}", "--momentum=0.9", *width)
    assert rows[2]["train_loss"] < rows[0]["train_loss"]


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_trains_the_tagger_on_sentences(tmp_path, monkeypatch, solver):
    monkeypatch.setitem(tables.DATASETS, "conll2000", lambda data_dir: sentences())
    flags = ["--dataset=conll2000", "--model=lstm", "--alpha=1", "--shuffle"]
    rows = run(tmp_path, *flags, f"--solver={solver}")
    assert rows[2]["train_loss"] < rows[0]["train_loss"]


def test_padding_changes_no_metric(tmp_path, monkeypatch):
    found = []
    for columns in (6, 9):
        monkeypatch.setitem(tables.DATASETS, "conll2000", lambda data_dir, c=columns: sentences(c))
        flags = ["--dataset=conll2000", "--model=lstm", "--alpha=1", "--solver=svrg"]
        found.append(run(tmp_path / str(columns), *flags))
    assert found[0] == found[1]


def test_fixed_point_that_holds_whole_numbers_only_says_so(capsys):
    flags = ["--solver=lp-sgd", "--format=fixed8", "--limit-train=64", "--n-epochs=1"]
    assert run_models.main(flags) == 0
    assert "fixed8 with scale none holds whole numbers only" in capsys.readouterr().out
    assert run_models.main([*flags, "--scale=0.03125"]) == 0
    assert "whole numbers" not in capsys.readouterr().out


def test_a_model_and_data_that_do_not_go_together_are_told_which_do(capsys):
    """Before the data is looked for."""
    message = mistake(capsys, "--model=lstm")
    assert message.endswith(
        "--dataset=digits holds images, which --model=lstm does not take: choose --model=logreg, "
        "lenet or resnet"
    )
    for model in ("logreg", "lenet", "resnet"):
        message = mistake(capsys, "--dataset=conll2000", f"--model={model}")
        assert message.endswith(f"which --model={model} does not take: choose --model=lstm")


@pytest.mark.parametrize("solver", ["sgd", "svrg"])
def test_augmentation_changes_what_is_trained_on_but_not_what_is_measured(tmp_path, solver):
    flags = ["--model=lenet", f"--solver={solver}"]
    plain = run(tmp_path / "a", *flags)
    augmented = run(tmp_path / "b", *flags, "--augment")
    assert augmented[0] == plain[0]
    assert augmented[1]["train_loss"] != plain[1]["train_loss"]
    assert run(tmp_path / "c", *flags, "--augment") == augmented


@pytest.mark.parametrize("random", [["--shuffle"], ["--augment", "--model=lenet"]])
def test_measuring_less_often_changes_no_random_numbers(tmp_path, random):
    every = run(tmp_path / "a", "--n-epochs=4", "--solver=sgd", *random)
    some = run(tmp_path / "b", "--n-epochs=4", "--solver=sgd", "--measure-every=4", *random)
    assert some == [every[0], every[4]]


def test_labels_outside_the_classes_are_named(capsys):
    message = mistake(capsys, "--n-classes=5")
    assert re.search(r"must lie in 0 \.\.\. 4 .* but the label in row \d+ is [5-9]", message)


def test_nan_in_the_data_is_named_with_its_batch(capsys, monkeypatch):
    def broken(folder):
        data = tables.load_digits()
        data.train_inputs[17, 3] = math.nan
        return data

    monkeypatch.setitem(tables.DATASETS, "digits", broken)
    assert "the inputs of batch 1 hold nan in row 1 (row 17" in mistake(capsys)


def test_an_output_folder_that_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    message = mistake(capsys, f"--output={tmp_path / 'file' / 'run'}")
    assert "cannot be written" in message


def test_an_output_folder_with_a_run_is_refused_and_kept(tmp_path, capsys):
    run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert "already holds a run" in mistake(capsys, f"--output={tmp_path}")
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_absent_mnist_is_a_sentence(tmp_path, capsys, monkeypatch):
    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "mirrors", [])
    assert main(["--dataset=mnist", f"--data-dir={tmp_path}"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "put train-images-idx3-ubyte" in last


def test_it_runs_from_any_folder_as_the_older_system_was_run(tmp_path):
    command = [sys.executable, "run_models.py", *SMALL, "--solver=sgd", "--rounding=void"]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, check=True)
    elsewhere = [sys.executable, str(SCRIPT), *command[2:]]
    again = subprocess.run(elsewhere, cwd=tmp_path, capture_output=True, text=True, check=True)
    strip = re.compile(r"[\d.]+ s$", re.MULTILINE)
    assert strip.sub("", done.stdout) == strip.sub("", again.stdout)
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_on_the_command_line_ends_the_process_with_2_and_no_traceback(tmp_path):
    command = [sys.executable, str(SCRIPT), "--alpha=-1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(os.environ.get("CUDA_VISIBLE_DEVICES") == "", reason="no GPU wanted")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_trains_on_the_gpu(tmp_path, solver):
    rows = run(tmp_path, f"--solver={solver}", "--cuda")
    assert rows[2]["train_loss"] < rows[0]["train_loss"]


def test_mnist_trains(tmp_path, halp_data):
    flags = ["--dataset=mnist", f"--data-dir={halp_data}", "--limit-train=1000", "--alpha=0.05"]
    rows = run(tmp_path, *flags)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert rows[-1]["test_accuracy"] > 0.6


def test_an_interrupt_ends_a_run_in_a_sentence(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_models, "run", interrupted)
    assert run_models.main([]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("solver", ["sgd", "svrg", "bc-svrg"])
def test_a_run_that_diverges_stops_in_a_sentence_and_keeps_what_was_measured(
    solver, tmp_path, capsys
):
    flags = [f"--solver={solver}", "--alpha=1e38", "--n-epochs=3", "--limit-train=64"]
    assert main([*flags, f"--output={tmp_path / 'run'}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run_models.py: the run has diverged: step ")
    assert "try a lower learning rate than 1e+38" in line
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert main([*flags, "--on-overflow=warn"]) == 0


def test_cached_offsets_that_do_not_fit_name_the_way_out(monkeypatch, capsys):
    monkeypatch.setattr("halp.bitcenter.cache_files.available_memory", lambda: 1000)
    assert main(["--n-epochs=1", "--limit-train=64"]) == 2
    assert "--on-site-compute" in capsys.readouterr().err
    assert main(["--n-epochs=1", "--limit-train=64", "--on-site-compute"]) == 0
