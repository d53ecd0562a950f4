"""Claims about runs that are killed and resumed, on a few digits."""

import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import compare_runs
import run_models
import tables
from halp.training import RunFolder
from run_models import main
from tables import REPOSITORY, SOLVERS
from tests.exp_script.processes import ended, start
from tests.rarely import rarely_but
from tests.training.states import assert_same, files, newest

IN_ORDER = (  # six steps an epoch; checkpoints and snapshots fall amid epochs and cycles
    "--n-epochs=4 --limit-train=46 --batch-size=8 -T=4 --momentum=0.9 --reg=0.01 "
    "--checkpoint-every=5"
).split()
SMALL = [*IN_ORDER, "--shuffle"]
LONG = (
    "--solver=bc-svrg --rounding=stoc --n-epochs=25 --limit-train=160 --batch-size=8 -T=15 "
    "--momentum=0.9 --shuffle --checkpoint-every=2"
).split()
OFFSETS = {"on-site": ["--on-site-compute", "--shuffle"], "cached": []}


class Killed(BaseException):
    """The end of a process, as far as a test without processes can have one."""


@contextmanager
def dying_after(steps, monkeypatch):
    """Within the block, a run dies when it has done so many steps, and the block ends."""
    progress = run_models._progress

    def deadly(*args):
        bar, left = progress(*args), steps

        def update():
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed

        bar.update = update
        return bar

    with monkeypatch.context() as patch:
        patch.setattr(run_models, "_progress", deadly)
        with pytest.raises(Killed):
            yield


def rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def assert_same_run(left: Path, right: Path) -> None:
    assert rows(left) == rows(right)
    assert_same(newest(left / "checkpoints"), newest(right / "checkpoints"))


def run(folder: Path, *argv: str) -> Path:
    assert main([*argv, f"--output={folder}"]) == 0
    return folder


def interrupted(folder: Path, *argv: str, after: int, monkeypatch) -> Path:
    with dying_after(after, monkeypatch):
        main([*argv, f"--output={folder}"])
    return folder


def mistake(capsys, *argv: object) -> str:
    capsys.readouterr()
    assert main([str(a) for a in argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("run_models.py: error: ")


@pytest.mark.parametrize(
    "solver, rounding, offsets",
    rarely_but(
        [
            ("sgd", "near", "on-site"),
            ("lp-svrg", "stoc", "on-site"),
            ("bc-sgd", "near", "cached"),
            ("bc-svrg", "stoc", "cached"),
            ("bc-svrg", "near", "on-site"),
        ],
        itertools.product(SOLVERS, ["near", "stoc"], OFFSETS),
    ),
)
def test_a_resumed_run_is_the_undisturbed_one(tmp_path, monkeypatch, solver, rounding, offsets):
    argv = [*IN_ORDER, f"--solver={solver}", f"--rounding={rounding}", *OFFSETS[offsets]]
    whole = run(tmp_path / "whole", *argv)
    killed = interrupted(tmp_path / "killed", *argv, after=13, monkeypatch=monkeypatch)
    assert newest(killed / "checkpoints")["steps"] == 10
    assert main(["--resume", str(killed)]) == 0
    assert_same_run(killed, whole)


RESNET = (
    "--model=resnet --resnet-width=4 --alpha=0.02 --limit-train=16 --rounding=stoc "
    "--checkpoint-every=3 --resnet-lr-drops 1 2"
)


@pytest.mark.parametrize(
    "flags, after",
    [
        ("--model=lenet --augment", 14),
        ("--format=fixed8 --mu=0.5 --rounding=stoc --measure-every=3", 19),
        ("--checkpoint-every=1e --offset-dtype=float64", 20),
        ("--checkpoint-every=6 --solver=svrg", 13),
    ],
)
def test_whatever_the_run_it_goes_on(tmp_path, monkeypatch, flags, after):
    argv = [*SMALL, *flags.split()]
    whole = run(tmp_path / "whole", *argv)
    killed = interrupted(tmp_path / "killed", *argv, after=after, monkeypatch=monkeypatch)
    assert main(["--resume", str(killed)]) == 0
    assert_same_run(killed, whole)


@pytest.mark.slow
def test_fine_tuning_and_saved_resnets_go_on_too(tmp_path, monkeypatch):
    resnet = [*SMALL, *RESNET.split()]

    def saving(name):
        folder = f"--resnet-save-ckpt-path={tmp_path / name}"
        return [*resnet, "--solver=sgd", "--resnet-save-ckpt", "--resnet-save-epochs=2", folder]

    whole = run(tmp_path / "whole", *saving("a"))
    killed = interrupted(tmp_path / "killed", *saving("b"), after=7, monkeypatch=monkeypatch)
    assert main(["--resume", str(killed)]) == 0
    assert_same_run(killed, whole)
    for name in ("resnet-epoch-2.pt", "resnet-epoch-4.pt"):
        left, right = (torch.load(tmp_path / where / name) for where in "ab")
        assert_same(left, right)
    tuning = (
        f"--resnet-load-ckpt --resnet-load-ckpt-path={tmp_path / 'a'} "
        "--resnet-load-ckpt-epoch-id=2 --resnet-fine-tune"
    ).split()
    whole = run(tmp_path / "tuned", *resnet, *tuning)
    killed = interrupted(tmp_path / "half", *resnet, *tuning, after=5, monkeypatch=monkeypatch)
    assert main(["--resume", str(killed)]) == 0
    assert_same_run(killed, whole)


def test_the_same_command_gives_the_same_checkpoints(tmp_path):
    assert_same_run(run(tmp_path / "a", *SMALL), run(tmp_path / "b", *SMALL))


def test_seconds_add_up_over_a_resume(tmp_path, monkeypatch):
    killed = interrupted(tmp_path, *SMALL, after=17, monkeypatch=monkeypatch)
    assert main(["--resume", str(killed)]) == 0
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    # 15 of the third epoch's steps, three of its six, came before.
    assert min(seconds[1:]) > 0


# Killed processes.


def wait_for(condition, process, log: Path) -> None:
    while not condition():
        assert process.is_alive(), log.read_text()
        time.sleep(0.01)


def killed_at_random(folder: Path, log: Path, argv: list[str], kills: int, seed: int) -> int:
    """Start a run, kill it at random moments and go on, to the end; return how often it died."""
    moments, deaths = random.Random(seed), 0
    while True:
        begun = (folder / "config.json").exists()
        process = start(["--resume", str(folder)] if begun else [*argv, f"--output={folder}"], log)
        if deaths < kills:
            process.join(moments.uniform(0.02, 0.5))
            process.kill()
        code = ended(process)
        assert code in (0, -signal.SIGKILL), log.read_text()
        if code == 0:
            return deaths
        deaths += 1


@pytest.fixture(scope="module")
def whole_long(tmp_path_factory):
    """The long run, undisturbed."""
    folder = tmp_path_factory.mktemp("long")
    assert ended(start([*LONG, f"--output={folder / 'run'}"], folder / "log")) == 0
    return folder / "run"


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(tmp_path, whole_long):
    deaths = killed_at_random(tmp_path / "killed", tmp_path / "log", LONG, kills=12, seed=3)
    assert deaths >= 10, "the run is too short for the claim"
    assert_same_run(tmp_path / "killed", whole_long)
    assert len(files(tmp_path / "killed" / "checkpoints")) == 2
    names = {path.name for path in (tmp_path / "killed").iterdir()}
    assert names == {".lock", "checkpoints", "config.json", "metrics.jsonl"}


def test_killed_at_each_call_that_writes_a_checkpoint_or_metrics(tmp_path):
    """Beginning, checkpoint, row and checkpoint: before each sync, rename and removal of them."""
    argv = [*SMALL, "--n-epochs=1", "--checkpoint-every=3"]
    whole = run(tmp_path / "whole", *argv)
    log = tmp_path / "log"
    for number in range(1, 100):
        folder = tmp_path / str(number)
        if ended(start([*argv, f"--output={folder}"], log, die_at=number)) == 0:
            break
        begun = (folder / "config.json").exists()
        again = ["--resume", str(folder)] if begun else [*argv, f"--output={folder}"]
        assert ended(start(again, log)) == 0, log.read_text()
        assert_same_run(folder, whole)
        assert not list(folder.rglob("*.unfinished"))
    assert number > 15


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_makes_a_checkpoint_and_says_how_to_go_on(tmp_path, whole_long, signum):
    stopped, log = tmp_path / "stop it", tmp_path / "log"
    process = start([*LONG, "--checkpoint-every=100e", f"--output={stopped}"], log)
    wait_for(lambda: (stopped / "metrics.jsonl").exists() and len(rows(stopped)) > 1, process, log)
    os.kill(process.pid, signum)
    assert ended(process) == 128 + signum
    line = log.read_text().splitlines()[-1]
    pattern = (
        rf"run_models.py: {signum.name}: training was stopped after (\d+) steps; to go on: (.*)"
    )
    match = re.fullmatch(pattern, line)
    assert match is not None, line
    assert newest(stopped / "checkpoints")["steps"] == int(match[1])
    program, script, *flags = shlex.split(match[2])
    assert (program, Path(script).name) == ("python", "run_models.py")
    assert flags == ["--resume", str(stopped)]
    assert ended(start(flags, log)) == 0
    assert_same_run(stopped, whole_long)


def during_measurement(monkeypatch, *signals):
    measure = run_models.measure

    def signalled(*args, **kwargs):
        for signum in signals:
            signal.raise_signal(signum)
        return measure(*args, **kwargs)

    monkeypatch.setattr(run_models, "measure", signalled)


def test_a_signal_during_a_measurement_is_acted_on_after_it(tmp_path, monkeypatch, capsys):
    whole = run(tmp_path / "whole", *SMALL)
    with monkeypatch.context() as patch:
        during_measurement(patch, signal.SIGTERM)
        assert main([*SMALL, f"--output={tmp_path / 'out'}"]) == 143
    assert "stopped after 0 steps" in capsys.readouterr().err
    assert main(["--resume", str(tmp_path / "out")]) == 0
    assert_same_run(tmp_path / "out", whole)


def test_a_second_signal_ends_at_once(tmp_path, monkeypatch, capsys):
    during_measurement(monkeypatch, signal.SIGINT, signal.SIGTERM)
    assert main([*SMALL, f"--output={tmp_path}"]) == 143
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run_models.py: SIGTERM: ended at once; to go on: python ")
    assert files(tmp_path / "checkpoints") == []


def test_signal_handlers_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run(tmp_path, *SMALL)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_without_output_a_signal_ends_the_run_and_says_that_nothing_is_kept(monkeypatch, capsys):
    during_measurement(monkeypatch, signal.SIGINT)
    argv = [flag for flag in SMALL if not flag.startswith("--checkpoint")]
    assert main(argv) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("stopped after 0 steps; nothing is kept, since there was no --output")


def test_a_comparison_that_is_interrupted_names_the_run_to_go_on_with(
    tmp_path, monkeypatch, capsys
):
    during_measurement(monkeypatch, signal.SIGINT)
    argv = ["--solvers", "sgd", "svrg", f"--output={tmp_path}", *SMALL]
    assert compare_runs.main(argv) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compare_runs.py: SIGINT: ")
    assert line.endswith(f"--resume {tmp_path / 'sgd'}")


# A full disk.


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk with room for little more than one checkpoint of the small run."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=144k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True) if shutil.which("mount") else None
    if done is None or done.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stops_the_run_in_a_sentence_and_the_last_checkpoint_loads(
    small_disk, tmp_path, capsys
):
    whole = run(tmp_path / "whole", *SMALL, "--checkpoint-every=1")
    line = mistake(capsys, *SMALL, "--checkpoint-every=1", f"--output={small_disk / 'run'}")
    path = re.match(r"the checkpoint (\S+) cannot be written: No space left on device; ", line)
    assert path is not None, line
    assert "when that is put right, to go on: python " in line
    assert not list(small_disk.rglob("*.unfinished"))
    assert len(files(small_disk / "run" / "checkpoints")) == 2
    assert main(["--resume", str(small_disk / "run")]) == 2  # still full
    shutil.copytree(small_disk / "run", tmp_path / "run")
    assert main(["--resume", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", whole)


def test_metrics_that_cannot_be_written_stop_the_run_and_stay_whole(tmp_path, monkeypatch, capsys):
    from halp.training import records

    write, left = records.write_whole, 3  # config.json, the empty rows, the first row

    def full(path, *parts):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        write(path, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(records, "write_whole", full)
        line = mistake(capsys, *SMALL, f"--output={tmp_path}")
    assert line.startswith(f"{tmp_path / 'metrics.jsonl'} cannot be written: No space left")
    assert len(rows(tmp_path)) == 1
    assert main(["--resume", str(tmp_path)]) == 0
    assert len(rows(tmp_path)) == 5


# The folder.


def test_a_folder_takes_one_run_at_a_time(tmp_path, capsys):
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start([*LONG, f"--output={folder}"], log)
    wait_for((folder / "checkpoints").exists, process, log)
    expected = f"another process is writing a run into {folder}: wait for its end"
    assert mistake(capsys, *LONG, f"--output={folder}") == expected
    assert mistake(capsys, "--resume", folder) == expected
    process.kill()
    assert ended(process) == -signal.SIGKILL
    RunFolder(folder, None).close()  # the lock went with the process


def test_two_that_start_at_the_same_time_do_not_mix(tmp_path):
    argv = [*SMALL, f"--output={tmp_path / 'run'}"]
    processes = [start(argv, tmp_path / f"log {i}") for i in range(2)]
    assert sorted(ended(process) for process in processes) == [0, 2]
    assert_same_run(tmp_path / "run", run(tmp_path / "whole", *SMALL))


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_a_finished_run_says_so_and_changes_nothing(tmp_path, capsys):
    run(tmp_path, *SMALL)
    before = contents(tmp_path)
    assert main(["--resume", str(tmp_path)]) == 0
    assert "the run is finished; --n-epochs=8 would" in capsys.readouterr().out
    assert contents(tmp_path) == before


@pytest.mark.parametrize("every", ["1", "3"])
def test_a_finished_run_can_be_made_longer(tmp_path, every):
    measured = f"--measure-every={every}"
    whole = run(tmp_path / "whole", *SMALL, measured, "--n-epochs=7")
    run(tmp_path / "run", *SMALL, measured)
    assert main(["--resume", str(tmp_path / "run"), "--n-epochs=7"]) == 0
    assert_same_run(tmp_path / "run", whole)
    # And that it is longer is part of the run.
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["settings"]["n_epochs"] == 7


def test_a_run_that_died_before_its_first_checkpoint_starts_from_the_beginning(
    tmp_path, monkeypatch, capsys
):
    whole = run(tmp_path / "whole", *SMALL)
    killed = interrupted(tmp_path / "killed", *SMALL, after=3, monkeypatch=monkeypatch)
    capsys.readouterr()
    assert main(["--resume", str(killed)]) == 0
    assert (
        "there is no checkpoint yet: the run starts from the beginning" in capsys.readouterr().out
    )
    assert_same_run(killed, whole)


def test_rows_after_the_checkpoint_are_dropped(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", *SMALL)
    argv = [*SMALL, "--checkpoint-every=10"]
    killed = interrupted(tmp_path / "killed", *argv, after=19, monkeypatch=monkeypatch)
    assert len(rows(killed)) == 4
    with dying_after(1, monkeypatch):
        main(["--resume", str(killed)])
    assert rows(killed) == rows(whole)[:2]
    assert main(["--resume", str(killed)]) == 0
    assert rows(killed) == rows(whole)


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_taken(
    tmp_path, monkeypatch, capsys
):
    whole = run(tmp_path / "whole", *SMALL)
    killed = interrupted(tmp_path / "killed", *SMALL, after=17, monkeypatch=monkeypatch)
    older, newer = files(killed / "checkpoints")
    content = bytearray(newer.read_bytes())
    content[len(content) // 2] ^= 4
    newer.write_bytes(content)
    capsys.readouterr()
    assert main(["--resume", str(killed)]) == 0
    assert f"{newer.name} is damaged (its content is not what its checksum says): going on from " \
        f"the one before, {older.name}" in capsys.readouterr().out  # fmt: skip
    assert_same_run(killed, whole)


def test_two_damaged_checkpoints_are_a_sentence(tmp_path, monkeypatch, capsys):
    killed = interrupted(tmp_path, *SMALL, after=17, monkeypatch=monkeypatch)
    for path in files(killed / "checkpoints"):
        path.write_bytes(b"")
    assert "no checkpoint in" in mistake(capsys, "--resume", killed)


# Flags.


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run of bc-svrg that has died."""
    folder = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patch:
        return interrupted(folder, *SMALL, "--solver=bc-svrg", after=13, monkeypatch=patch)


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--alpha=0.3", "--alpha=0.3 would change the run in {0}, which has --alpha=0.1: "),
        ("-T 5", "-T=5 would change the run in {0}, which has -T=4: "),
        ("--rounding=stoc", "--rounding=stoc would change the run in {0}, which has --rounding=n"),
        ("--solver=sgd", "--solver=sgd would change"),
        ("--augment --model=lenet", "--model=lenet would change"),
        ("--offset-dtype=float64", "--offset-dtype=float64 would change"),
        ("--seed=1", "--seed=1 would change"),
        ("--measure-every=2", "--measure-every=2 would change"),
        ("--output=elsewhere", "--output=elsewhere would change"),
        ("--n-epochs=3", "--n-epochs=3 is less than the 4 of the run"),
        ("--n-epochs=none", "it must be a whole number"),
        ("--checkpoint-every=0", "it must be a number of steps, as in 500, or of epochs"),
        ("--unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_a_flag_that_would_change_the_numbers_is_refused_by_name(half, capsys, flags, reason):
    before = contents(half)
    assert reason.format(half) in mistake(capsys, "--resume", half, *flags.split())
    assert contents(half) == before


def test_flags_that_change_no_number_are_taken(half, tmp_path):
    whole = run(tmp_path / "whole", *SMALL, "--solver=bc-svrg", "--n-epochs=5")
    folder = tmp_path / "moved"
    shutil.copytree(half, folder)
    flags = f"-e 5 --checkpoint-every=1e --data-dir={tmp_path} -T 4 --alpha=0.1 --format=fp16"
    assert main(["--resume", str(folder), *flags.split()]) == 0
    assert_same_run(folder, whole)
    assert [path.name for path in files(folder / "checkpoints")] == [
        "step-000000024.pt",
        "step-000000030.pt",
    ]


def test_data_that_changed_under_a_run_is_refused(half, monkeypatch, capsys):
    def changed(folder):
        data = tables.load_digits()
        data.test_labels[3] = (data.test_labels[3] + 1) % 10
        return data

    monkeypatch.setitem(tables.DATASETS, "digits", changed)
    assert mistake(capsys, "--resume", half).startswith("digits is not what the run began with")


def test_another_version_of_pytorch_is_noted(half, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "moved"
    shutil.copytree(half, folder)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert main(["--resume", str(folder)]) == 0
    assert re.search(r"torch is 9\.9\.9, but the run began with \d", capsys.readouterr().out)


def test_a_folder_without_a_run_and_a_configuration_that_is_none_are_sentences(tmp_path, capsys):
    path = tmp_path / "config.json"
    resume = ["--resume", tmp_path]
    assert mistake(capsys, *resume) == f"{tmp_path} holds no run: there is no config.json in it"
    assert "holds no run" in mistake(capsys, "--resume", tmp_path / "absent")
    for text in ("", "{", "[1]"):
        path.write_text(text)
        assert mistake(capsys, *resume).startswith(f"{path} cannot be read: ")
    for config in ({}, {"settings": {"alpha": 1}}, {"settings": 3}):
        path.write_text(json.dumps(config))
        assert "is not of this version of halp" in mistake(capsys, *resume)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}


def test_checkpoints_need_a_folder(capsys):
    assert "--checkpoint-every=3 was given without --output" in mistake(
        capsys, "--checkpoint-every=3"
    )


def test_a_comparison_cannot_be_resumed_as_a_whole(capsys, tmp_path):
    assert compare_runs.main(["--resume", str(tmp_path)]) == 2
    assert "--resume is for run_models.py, and for one run" in capsys.readouterr().err


@pytest.mark.slow
def test_kill_minus_nine_from_outside(tmp_path):
    """The commands as they are typed, each in a new interpreter."""
    script = str(REPOSITORY / "exp_script" / "run_models.py")
    folder = tmp_path / "killed"
    moments = random.Random(0)
    for _ in range(4):
        begun = (folder / "config.json").exists()
        flags = ["--resume", str(folder)] if begun else [*LONG, f"--output={folder}"]
        process = subprocess.Popen([sys.executable, script, *flags], stdout=subprocess.DEVNULL)
        time.sleep(moments.uniform(2, 6))
        subprocess.run(["kill", "-9", str(process.pid)], check=False)
        process.wait()
    flags = ["--resume", str(folder)]
    subprocess.run([sys.executable, script, *flags], stdout=subprocess.DEVNULL, check=True)
    assert_same_run(folder, run(tmp_path / "whole", *LONG))
