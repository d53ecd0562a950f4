"""Claims about files that a run did not write: it leaves them alone."""

import pytest

from run_models import main

SAVING = (
    "--model=resnet --resnet-width=1 --solver=sgd --limit-train=8 --batch-size=8 --n-epochs=1 "
    "--measure-every=9 --resnet-save-ckpt"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run and the folder that it saved into."""
    folder, saved = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("saved")
    assert main([*SAVING, f"--resnet-save-ckpt-path={saved}", f"--output={folder}"]) == 0
    return folder, saved


@pytest.mark.parametrize("flags", [["--n-epochs=2"], ["--n-epochs=3", "--resnet-save-epochs=2"]])
def test_a_run_that_becomes_longer_saves_over_no_other_checkpoint(run, capsys, flags):
    folder, saved = run
    another = saved / "resnet-epoch-2.pt"
    another.write_text("mine")
    assert main(["--resume", str(folder), *flags]) == 2
    assert f"{another} exists already and is not overwritten" in capsys.readouterr().err
    assert another.read_text() == "mine"


@pytest.mark.parametrize(
    "flags",
    [
        ["--model=" + "x" * 100_000],
        ["--dataset=" + "x" * 100_000],
        ["--seed=" + "9" * 100_000],
        ["--alpha=" + "x" * 100_000],
        ["--format=" + "x" * 100_000],
        ["--rounding=" + "x" * 100_000],
        ["--checkpoint-every=" + "9" * 100_000],
        ["--offset-dtype=" + "x" * 100_000],
        ["--" + "x" * 100_000],
        ["x"] * 50_000,
        ["--n-epochs=1", "--limit-train=8", "--output=" + "x" * 100_000],
        ["--resume=" + "x" * 100_000],
        ["--dataset=mnist", "--data-dir=" + "x" * 100_000],
        ["--dataset=cifar10", "--data-dir=" + "x" * 100_000],
        ["--dataset=conll2000", "--model=lstm", "--data-dir=" + "x" * 100_000],
    ],
    ids=lambda flags: "".join(flags)[:18],
)
def test_what_was_typed_is_not_quoted_at_length(capsys, flags):
    assert main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run_models.py: error: ")
    assert len(line) < 2100
