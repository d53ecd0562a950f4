"""Claims about the comparison that ``make demo`` shows."""

import re

import pytest

from compare_runs import main
from halp.training import read_metrics
from tables import SOLVERS

SMALL = ["--n-epochs=2", "--limit-train=64"]
DEMO_SOLVERS = ["sgd", "lp-sgd", "svrg", "lp-svrg", "bc-svrg"]


def test_a_table_a_figure_and_each_solvers_metrics(tmp_path, capsys):
    assert main([*SMALL, f"--output={tmp_path}"]) == 0
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")
    for solver in DEMO_SOLVERS:
        assert [record.epoch for record in read_metrics(tmp_path / solver)] == [0, 1, 2]
    table = capsys.readouterr().out
    for row in ("SGD (float64)", "LP-SGD (fp16)", "SVRG (float64)", "LP-SVRG (fp16)"):
        assert re.search(rf"^{re.escape(row)} +[\d.e+-]+ +[\d.e+-]+ +\d+\.\d+%", table, re.M)
    assert "HALP (fp16)" in table


def test_solvers_and_flags_can_be_chosen(tmp_path):
    figure = tmp_path / "picture.png"
    argv = ["--solvers", "sgd", "bc-sgd", f"--output={tmp_path / 'out'}", f"--figure={figure}"]
    assert main([*SMALL, *argv, "--format=bf16", "--rounding=stoc"]) == 0
    assert figure.exists()
    folders = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert folders == ["bc-sgd", "sgd"]


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["--solver=sgd"], "with --solvers, not --solver"),
        (["--solvers", "adam"], "'adam'"),
        (["--alpha=-1"], "at least 0, not -1.0"),
        (
            "--solvers sgd lp-sgd --model=resnet --resnet-save-ckpt "
            "--resnet-save-ckpt-path=d".split(),
            "would write the same files for several solvers",
        ),
    ],
)
def test_wrong_use_is_a_sentence(tmp_path, capsys, argv, reason):
    assert main([*SMALL, f"--output={tmp_path}", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert line.startswith("compare_runs.py: error: ")


def test_a_folder_with_earlier_runs_is_refused(tmp_path, capsys):
    argv = [*SMALL, f"--output={tmp_path}", "--solvers", "sgd"]
    assert main(argv) == 0
    assert main([*argv, f"--figure={tmp_path / 'another.png'}"]) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_shows_what_the_readme_says(tmp_path):
    """LP-SVRG stalls far from the optimum that HALP reaches together with SVRG."""
    assert main([f"--output={tmp_path}"]) == 0
    final = {solver: read_metrics(tmp_path / solver)[-1] for solver in DEMO_SOLVERS}
    assert set(final) < set(SOLVERS)
    assert final["svrg"].grad_norm < 1e-12
    assert final["bc-svrg"].grad_norm < 1e-12
    assert 1e-4 < final["lp-svrg"].grad_norm < 1e-2
    assert final["lp-sgd"].grad_norm > 1e-3
    assert final["bc-svrg"].train_loss == pytest.approx(0.7422233385, abs=1e-10)


@pytest.mark.parametrize(
    "flags, name", [([], "convergence.png"), (["--figure={}/my.jpg"], "my.jpg")]
)
def test_a_figure_takes_no_other_files_place(tmp_path, capsys, flags, name):
    (tmp_path / name).write_text("mine")
    flags = [flag.format(tmp_path) for flag in flags]
    assert main([*SMALL, f"--output={tmp_path}", "--solvers", "sgd", *flags]) == 2
    assert f"{name} exists already and is not overwritten" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
