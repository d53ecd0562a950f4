"""The command lines of the older system, which must go on working, on a few samples."""

import os
import subprocess
import sys

import pytest

from halp.training import read_metrics
from run_models import main
from settings import parse
from tables import REPOSITORY

COMMANDS = {
    "logreg-halp": "--n-epochs=100 --batch-size=100 --reg=1e-5 --alpha=0.05 --momentum=0.9 "
    "--seed=1  --n-classes=10  --solver=bc-svrg  --rounding=near  -T=600  --dataset=mnist  "
    "--model=logreg  --cuda",
    "logreg-sgd": "--n-epochs=100 --batch-size=100 --reg=1e-5 --alpha=0.01 --momentum=0.9 "
    "--seed=1  --n-classes=10  --solver=sgd  --rounding=void --dataset=mnist  --model=logreg  "
    "--cuda",
    "lenet-halp": "--n-epochs=100 --batch-size=128 --reg=0.0005 --alpha=0.001 --momentum=0.9 "
    "--seed=1  --n-classes=10  --solver=bc-svrg  --rounding=near  -T=391  --dataset=cifar10  "
    "--model=lenet  --cuda",
    "lenet-svrg": "--n-epochs=100 --batch-size=128 --reg=0.0005 --alpha=0.001 --momentum=0.9 "
    "--seed=1  --n-classes=10  --solver=svrg  --rounding=void  -T=391  --dataset=cifar10  "
    "--model=lenet  --cuda",
    "lstm-halp": "--n-epochs=100 --batch-size=16 --reg=0.0 --alpha=0.5 --momentum=0.0 --seed=3  "
    "--n-classes=12  --solver=bc-svrg  --rounding=near  -T=279  --dataset=conll2000  "
    "--model=lstm  --cuda  --on-site-compute",
    "lstm-sgd": "--n-epochs=100 --batch-size=16 --reg=0.0 --alpha=5.0 --momentum=0.0 --seed=1  "
    "--n-classes=12  --solver=lp-sgd  --rounding=near --dataset=conll2000  --model=lstm  --cuda  "
    "--on-site-compute",
    "resnet-save": "--n-epochs=350 --batch-size=128 --reg=0.0005 --alpha=0.1 --momentum=0.9 "
    "--seed=1  --n-classes=10  --solver=lp-sgd  --rounding=near  -T=391  --dataset=cifar10  "
    "--model=resnet  --cuda  --resnet-save-ckpt  --resnet-save-ckpt-path=FOLDER",
    "resnet-halp": "--n-epochs=100 --batch-size=128 --reg=0.0005 --alpha=0.1 --momentum=0.0 "
    "--seed=1  --n-classes=10  --solver=bc-svrg  --rounding=near  -T=391  --dataset=cifar10  "
    "--model=resnet  --cuda  --on-site-compute --resnet-load-ckpt  "
    "--resnet-save-ckpt-path=FOLDER --resnet-load-ckpt-epoch-id=300",
}
REDUCED = ["--limit-train=64", "--n-epochs=1"]


def flags_of(name: str, folder="FOLDER") -> list[str]:
    """A command line, but on the CPU."""
    return COMMANDS[name].replace("--cuda", "").replace("FOLDER", str(folder)).split()


def check_run(argv: list[str], output, capsys) -> None:
    """The run prints a line an epoch, and writes its files."""
    assert main([*argv, *REDUCED, f"--output={output}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    epochs = [line[:9] for line in lines if line.startswith("epoch")]
    assert epochs == ["epoch 0/1", "epoch 1/1"]
    first, last = read_metrics(output)
    assert last.train_loss > 0 and last.train_loss != first.train_loss
    assert 0 <= last.test_accuracy <= 1
    names = sorted(path.name for path in output.iterdir())
    assert names == [".lock", "checkpoints", "config.json", "metrics.jsonl"]


@pytest.fixture(scope="module")
def conll2000(halp_data, tmp_path_factory):
    """A folder into which the page's command has prepared the data."""
    folder = tmp_path_factory.mktemp("data")
    command = [sys.executable, "utils/postag_data_utils.py", f"--output={folder / 'conll2000'}"]
    environment = {**os.environ, "HALP_DATA": str(halp_data)}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_known_and_means_what_it_meant(name):
    flags = flags_of(name)
    settings = parse(flags)
    values = dict(flag.lstrip("-").split("=") for flag in flags if "=" in flag)
    for key in ("dataset", "model", "solver"):
        assert getattr(settings, key) == values[key]
    for key in ("alpha", "momentum", "reg"):
        assert getattr(settings, key) == float(values[key])
    for key in ("n-epochs", "batch-size", "n-classes", "seed"):
        assert getattr(settings, key.replace("-", "_")) == int(values[key])
    if settings.T is not None:
        assert settings.T == int(values["T"])
    if settings.rounding is not None:
        assert settings.rounding == values["rounding"]


@pytest.mark.parametrize("name", ["logreg-halp", "logreg-sgd"])
def test_logistic_regression_runs(name, halp_data, tmp_path, capsys):
    check_run([*flags_of(name), f"--data-dir={halp_data}"], tmp_path / "out", capsys)


@pytest.mark.parametrize("name", ["lenet-halp", "lenet-svrg"])
def test_lenet_runs(name, halp_data, tmp_path, capsys):
    data = f"--data-dir={halp_data / 'cifar10-subset'}"
    check_run([*flags_of(name), data], tmp_path / "out", capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm-halp", "lstm-sgd"])
def test_lstm_runs(name, conll2000, tmp_path, capsys):
    check_run([*flags_of(name), f"--data-dir={conll2000}"], tmp_path / "out", capsys)


@pytest.mark.slow
def test_resnet_is_saved_and_fine_tuned(halp_data, tmp_path, capsys):
    """The run that saves is one epoch long, which is the epoch to load then."""
    data, folder = f"--data-dir={halp_data / 'cifar10-subset'}", tmp_path / "checkpoints"
    check_run([*flags_of("resnet-save", folder), data], tmp_path / "saved", capsys)
    assert [path.name for path in folder.iterdir()] == ["resnet-epoch-1.pt"]
    halp = [*flags_of("resnet-halp", folder), "--resnet-load-ckpt-epoch-id=1"]
    check_run([*halp, data], tmp_path / "tuned", capsys)
    before, after = read_metrics(tmp_path / "saved"), read_metrics(tmp_path / "tuned")
    assert after[0].train_loss == pytest.approx(before[-1].train_loss, rel=1e-3)
