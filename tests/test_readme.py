"""Everything that the README tells a newcomer to type works."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compare_runs
import run_models
from halp import formats
from halp.grid import ROUNDINGS
from settings import make_parser, parse
from tables import DATASETS, MODELS, SOLVERS
from tests.rarely import rarely_but

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()
REDUCED = ["--n-epochs=1", "--limit-train=64"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
#: What takes long although it is cut down: many solvers, real data, processes of their own.
DEAR = ("compare_runs.py", "benchmarks/", "mnist", "conll2000", "postag", "halp.formats")


def test_there_are_commands_and_an_example():
    assert len(COMMANDS) >= 6
    assert len(blocks("python")) == 3


@pytest.mark.parametrize(
    "command",
    rarely_but([c for c in COMMANDS if not any(word in c for word in DEAR)], COMMANDS),
)
def test_every_command_works(command, tmp_path, request):
    program, *arguments = shlex.split(command, comments=True)
    match program, arguments:
        case "make", [target]:
            if shutil.which("make") is None:
                pytest.skip("needs make")
            subprocess.run(["make", "-n", target], cwd=REPOSITORY, check=True, capture_output=True)
        case "pip", ["install", "-e", "."]:
            assert (REPOSITORY / "pyproject.toml").is_file()
        case "python", ["exp_script/run_models.py", *flags]:
            if "-ckpt" in command or "outputs/long" in command:
                return  # they belong together: see below
            if parse(flags).dataset == "mnist":
                flags = [*flags, f"--data-dir={request.getfixturevalue('halp_data')}"]
            if parse(flags).dataset == "conll2000":
                flags = [*flags, f"--data-dir={tmp_path}"]
                prepare(request.getfixturevalue("halp_data"), tmp_path)
            assert run_models.main([*flags, *REDUCED]) == 0
        case "python", ["utils/postag_data_utils.py"]:
            prepare(request.getfixturevalue("halp_data"), tmp_path)
        case "python", ["exp_script/compare_runs.py", *flags]:
            assert compare_runs.main([*flags, *REDUCED, f"--output={tmp_path}"]) == 0
        case "python", ["-m", "halp.formats"]:
            call = [sys.executable, *arguments]
            done = subprocess.run(call, capture_output=True, text=True, check=True)
            assert "fp8_e4m3" in done.stdout and not done.stderr
        case "python", ["exp_script/reproduce_paper.py", *_]:
            pass  # tests/exp_script/test_reproduce_paper.py runs it
        case "python", ["benchmarks/faults.py"]:
            pass  # tests/exp_script/test_resume.py does as much
        case "python", [benchmark] if benchmark.startswith("benchmarks/"):
            call = [sys.executable, benchmark, "--rounds=1"]
            done = subprocess.run(
                call,
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0 and done.stdout, done.stderr
        case _:
            pytest.fail(f"no test knows this command: {command}")


def prepare(halp_data: Path, output: Path) -> None:
    """Prepare the words' data, from files that are there."""
    script = REPOSITORY / "utils" / "postag_data_utils.py"
    call = [sys.executable, script, f"--data-dir={halp_data}", f"--output={output / 'conll2000'}"]
    subprocess.run(call, check=True, capture_output=True)


@pytest.mark.slow
def test_a_saved_resnet_starts_another_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(c)[2:] for c in COMMANDS if "-ckpt" in c]
    assert len(commands) == 2
    for flags in commands:
        assert run_models.main([*flags, "--limit-train=64"]) == 0
    losses = re.findall(r"train loss (\S+)", capsys.readouterr().out)
    assert float(losses[4]) == pytest.approx(float(losses[3]), rel=1e-3)


def test_a_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, second = (shlex.split(c)[2:] for c in COMMANDS if "outputs/long" in c)
    assert run_models.main([*first, *REDUCED]) == 0
    assert run_models.main([*second, "--n-epochs=2"]) == 0
    assert "goes on in epoch 2" in capsys.readouterr().out


def test_the_examples_train_a_model(tmp_path):
    """The second goes on where the first one ends."""
    first, second = (block for block in blocks("python") if "optimizer" in block)
    for example in (first, first.split("with halp.materialize")[0] + second):
        done = subprocess.run(
            [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        if example is first:
            check_the_output(done)
    assert list((tmp_path / "checkpoints").iterdir())


def check_the_output(done):
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    accuracy = re.search(r"test accuracy (\S+)%", done.stdout)
    assert accuracy is not None and float(accuracy[1]) > 85


def test_the_example_of_formats_runs():
    (example,) = (block for block in blocks("python") if "optimizer" not in block)
    exec(example, {})


def test_the_table_of_flags_is_that_of_the_parser():
    options = {name for action in make_parser()._actions for name in action.option_strings}
    known = options - {"-h", "--help"}
    table = re.search(r"^\| flag \|.*?\n\n", README, re.MULTILINE | re.DOTALL)
    assert table is not None
    first_column = [line.split("|")[1] for line in table[0].splitlines()[2:] if line]
    documented = re.findall(r"`(-\S+?)`", " ".join(first_column))
    assert sorted(documented) == sorted(known)


@pytest.mark.parametrize(
    "name", [*SOLVERS, *MODELS, *DATASETS, *formats.names(), *ROUNDINGS], ids=str
)
def test_everything_that_can_be_chosen_is_in_the_readme(name):
    assert re.search(rf"`([^`]*[^`\w-])?{name}([^`\w-][^`]*)?`", README)


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").glob("*.md")), ids=lambda p: p.name)
def test_examples_of_the_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for example in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
        exec(compile(example, page.name, "exec"), {"__name__": "example"})


def test_files_that_it_refers_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (REPOSITORY / target).is_file(), target
