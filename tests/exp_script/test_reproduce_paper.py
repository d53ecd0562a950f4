"""Claims about the script that repeats the paper's claims; its ``--quick`` run takes a while."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import reproduce_paper
from flags import UsageError
from paper_claims import Claim
from paper_experiments import EXPERIMENTS
from paper_problems import LeastSquares, digits, has_mnist
from paper_runs import Run, carry_out, halp_fixed, low_precision
from reproduce_paper import main
from tables import REPOSITORY

SCRIPT = REPOSITORY / "exp_script" / "reproduce_paper.py"


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """The quick run, from a working directory of its own, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("paper")
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--output=results"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return completed, folder / "results"


@pytest.mark.slow
def test_every_claim_of_the_quick_run_holds(quick):
    completed, folder = quick
    assert completed.returncode == 0, completed.stdout + completed.stderr
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert "DOES NOT HOLD" not in table
    assert table.count("**holds**") >= 10
    assert table in completed.stdout
    assert "MNIST is left out of --quick" in completed.stdout


@pytest.mark.slow
def test_the_quick_run_reports_on_every_experiment_and_draws_it(quick):
    completed, folder = quick
    table = (folder / "table.md").read_text(encoding="utf-8")
    for letter, experiment in EXPERIMENTS.items():
        assert f"## ({letter}) {experiment.title}" in table
        image = folder / f"{letter}_{experiment.file_name}.png"
        assert image.read_bytes().startswith(b"\x89PNG")
    progress = [line for line in completed.stdout.splitlines() if line.startswith("[")]
    total = int(progress[0].split("/")[1].split("]")[0])
    assert len(progress) == total


@pytest.mark.slow
def test_the_numbers_of_the_quick_run_are_those_of_its_runs(quick):
    """In another process, beside other runs: the same bits."""
    _, folder = quick
    numbers = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert list(numbers) == list(EXPERIMENTS)
    experiment = EXPERIMENTS["c"](quick=True, seed=0, data_dir=None)
    outcome = carry_out(experiment.runs()[10, 6])
    assert numbers["c"]["10, 6"] == {
        "gradient_norm": list(outcome.norms),
        "loss": list(outcome.losses),
    }


@pytest.mark.parametrize(
    "run",
    [
        Run(LeastSquares(3), "svrg", 1),
        pytest.param(low_precision(LeastSquares(3), "lp-sgd", 1, 8), marks=pytest.mark.slow),
        pytest.param(low_precision(LeastSquares(3), "lp-svrg", 1, 8), marks=pytest.mark.slow),
        halp_fixed(LeastSquares(3), 1, 8),
        pytest.param(halp_fixed(digits(3), 1, 16, mu=0.03), marks=pytest.mark.slow),
    ],
    ids=lambda run: run.description,
)
def test_a_run_done_twice_gives_the_same_bits(run):
    torch.rand(1)  # the global random state has no part in it
    first, second = carry_out(run), carry_out(run)
    assert (first.norms, first.losses) == (second.norms, second.losses)
    assert first.norms[0] != first.norms[1]


def test_the_seed_decides_data_and_samples():
    first, second = (carry_out(Run(LeastSquares(seed), "sgd", 1)) for seed in (0, 1))
    assert first.norms[0] != second.norms[0]


def test_the_least_squares_problem_has_the_condition_number_that_it_says():
    problem = LeastSquares(seed=2, condition=30)
    a, _ = problem.data
    eigenvalues = torch.linalg.eigvalsh(a.T @ a / len(a))
    assert eigenvalues.max().item() == pytest.approx(1, rel=1e-12)
    assert eigenvalues.min().item() == pytest.approx(1 / 30, rel=1e-12)


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["--only", "x"], "'x'"),
        (["--seed=-1"], "it must be a whole number in 0 ... 2147483647, not '-1'"),
        (["--seed=many"], "not 'many'"),
        (["--faster"], "--faster"),
        (["--quick", "--output=taken"], "taken"),
    ],
)
def test_wrong_use_is_a_sentence(tmp_path, monkeypatch, capsys, argv, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file, not a folder")
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("reproduce_paper.py: error: ")
    assert reason in line


def without_runs(monkeypatch, claims: dict[str, list[Claim]]) -> dict:
    """Make `main` report these claims; returns what it will be asked for."""
    asked = {}

    def reproduce(experiments, output):
        asked.update(experiments)
        return claims

    monkeypatch.setattr(reproduce_paper, "reproduce", reproduce)
    return asked


def test_mnist_is_never_left_out_in_silence(tmp_path, monkeypatch, capsys):
    asked = without_runs(monkeypatch, {})
    assert main([f"--data-dir={tmp_path}", "--only", "e"]) == 0
    assert f"MNIST is left out: its files are not in {tmp_path}" in capsys.readouterr().out
    assert {dataset for dataset, _ in asked["e"].runs()} == {"digits"}


def test_mnist_takes_part_where_its_files_are(tmp_path, monkeypatch, capsys):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for kind, number in (("images", 3), ("labels", 1)):
        for part in ("train", "t10k"):
            (raw / f"{part}-{kind}-idx{number}-ubyte.gz").touch()
    assert has_mnist(str(tmp_path))
    asked = without_runs(monkeypatch, {})
    assert main([f"--data-dir={tmp_path}"]) == 0
    assert "left out" not in capsys.readouterr().out
    assert {dataset for dataset, _ in asked["e"].runs()} == {"digits", "mnist"}


def test_a_claim_that_does_not_hold_shows_in_the_exit_code(monkeypatch, capsys):
    without_runs(monkeypatch, {"a": [Claim("so", "this", True), Claim("so", "that", False)]})
    assert main(["--only", "a"]) == 1
    assert "1 of these claims did not hold" in capsys.readouterr().err


def test_only_names_what_is_run_in_the_order_of_the_table(monkeypatch):
    asked = without_runs(monkeypatch, {})
    assert main(["--only", "d", "b"]) == 0
    assert list(asked) == ["b", "d"]


# What a user put there.


@pytest.fixture
def one_claim(monkeypatch):
    """Experiment b alone, with a claim that needs no runs."""

    def experiment(*arguments) -> SimpleNamespace:
        return SimpleNamespace(
            title="none",
            file_name="none",
            panels=1,
            runs=dict,
            claims=lambda outcomes: [Claim("so", "this", True)],
            draw=lambda figure, outcomes: None,
        )

    monkeypatch.setattr(reproduce_paper, "EXPERIMENTS", {"b": experiment})
    monkeypatch.setattr(reproduce_paper, "_carry_out", lambda runs: {})
    monkeypatch.setattr(reproduce_paper, "write_figure", lambda path, *_: path.write_text("drawn"))


@pytest.mark.parametrize("name", ["table.md", "results.json", "b_none.png"])
def test_results_take_no_other_files_place(tmp_path, monkeypatch, capsys, one_claim, name):
    (tmp_path / name).write_text("mine")
    experiments = {"b": reproduce_paper.EXPERIMENTS["b"]()}
    with pytest.raises(UsageError, match=f"{name} exists already and is not overwritten"):
        reproduce_paper.reproduce(experiments, tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_results_take_the_place_of_earlier_ones(tmp_path, monkeypatch, capsys, one_claim):
    experiments = {"b": reproduce_paper.EXPERIMENTS["b"]()}
    reproduce_paper.reproduce(experiments, tmp_path)
    (tmp_path / "b_none.png").write_text("earlier")
    reproduce_paper.reproduce(experiments, tmp_path)
    assert (tmp_path / "b_none.png").read_text() == "drawn"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "b_none.png",
        "results.json",
        "table.md",
    ]
