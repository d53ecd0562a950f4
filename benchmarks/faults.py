"""Kill a run at random moments, fill its disk up, damage its checkpoints, and compare bits.

python benchmarks/faults.py [--kills=50] [--seed=0] [any flags of run_models.py]
"""

import argparse
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "exp_script"))

import run_models  # noqa: E402
from halp.training import read_metrics  # noqa: E402
from halp.training.durable import DamagedError, unsealed  # noqa: E402

FLAGS = (
    "--solver=bc-svrg --rounding=stoc --momentum=0.9 --reg=1e-3 --shuffle --limit-train=320 "
    "--batch-size=8 -T=30 --n-epochs=100 --checkpoint-every=1"
).split()
TRAINING = ("epoch", "train_loss", "grad_norm", "test_loss", "test_accuracy")  # not seconds


def main() -> None:
    """Print a table; exit with 1 if a line of it does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args, others = parser.parse_known_args()
    flags = [*FLAGS, *others]
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread: runs are forked from this process
    holds = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child(["--limit-train=16", "--n-epochs=1"], folder / "log", fork=False)  # late imports
        started = time.perf_counter()
        assert wait(child([*flags, f"--output={folder / 'whole'}"], folder / "log")) == 0
        seconds = time.perf_counter() - started
        print(f"the run: {' '.join(flags)}\nundisturbed it takes {seconds:.1f} s\n")
        print(f"{'fault':34} {'result':70} holds")
        for fault, check in (
            ("the same command again", same_command),
            (f"kill -9, {args.kills} times", killed),
            ("a disk that fills up", full_disk),
            ("one flipped byte", flipped_bytes),
            ("a second run into the folder", second_run),
        ):
            result, held = check(folder, flags, args.kills, random.Random(args.seed))
            print(f"{fault:34} {result:70} {'yes' if held else 'NO'}", flush=True)
            holds = holds and held
    sys.exit(0 if holds else 1)


def child(argv: list[str], log: Path, fork: bool = True) -> int:
    """Start a run in a process of its own, with the interpreter as it is now; return its id."""
    process = os.fork() if fork else 0
    if process:
        return process
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    kept = os.dup(1), os.dup(2)
    os.dup2(out, 1), os.dup2(out, 2)
    code = run_models.main(argv)
    if fork:
        os._exit(code)
    os.dup2(kept[0], 1), os.dup2(kept[1], 2)
    return 0


def wait(process: int) -> int:
    """Return the exit code of a process, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def same_command(folder, flags, kills, moments):
    """Run it again."""
    code = wait(child([*flags, f"--output={folder / 'again'}"], folder / "log"))
    same = code == 0 and same_run(folder / "again", folder / "whole")
    return ("the same metrics, weights and state" if same else "differs"), same


def killed(folder, flags, kills, moments):
    """Kill the run at random moments, resume it each time, and let it end."""
    run, deaths, writing = folder / "killed", 0, 0
    while True:
        begun = (run / "config.json").exists()
        process = child(
            ["--resume", str(run)] if begun else [*flags, f"--output={run}"], folder / "log"
        )
        if deaths < kills:
            time.sleep(moments.uniform(0.01, 0.6))
            os.kill(process, signal.SIGKILL)
        code = wait(process)
        if code == 0:
            break
        if code != -signal.SIGKILL:
            return (folder / "log").read_text(), False
        deaths += 1
        writing += any(run.rglob("*.unfinished"))
    same = deaths >= kills and same_run(run, folder / "whole")
    outcome = "the same metrics, weights and state" if same else "differs or ended early"
    return f"{deaths} deaths, {writing} within a write: {outcome}", same


def full_disk(folder, flags, kills, moments):
    """Run on a tmpfs with room for two checkpoints and a half."""
    disk, size = folder / "disk", files(folder / "whole")[-1].stat().st_size
    disk.mkdir()
    room = f"size={5 * size // 2048 + 24}k"
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", room, "tmpfs", str(disk)])
    if mount.returncode != 0:
        return "left out: no right to mount a tmpfs", True
    try:
        code = wait(child([*flags, f"--output={disk / 'run'}"], folder / "log"))
        said = (folder / "log").read_text().splitlines()[-1]
        litter = list(disk.rglob("*.unfinished"))
        shutil.copytree(disk / "run", folder / "moved")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    steps = int(re.findall(r"\d+", files(folder / "moved")[-1].name)[0])
    resumed = wait(child(["--resume", str(folder / "moved")], folder / "log"))
    held = code == 2 and "No space left" in said and not litter and resumed == 0
    held = held and same_run(folder / "moved", folder / "whole")
    return f"exit {code}, a sentence; step {steps} loads, the end is the same", held


def flipped_bytes(folder, flags, kills, moments):
    """Flip each byte of the newest checkpoint, one at a time."""
    content = bytearray(files(folder / "whole")[-1].read_bytes())
    noticed = 0
    for position in range(len(content)):
        bit = 1 << moments.randrange(8)
        content[position] ^= bit
        try:
            unsealed(bytes(content))
        except DamagedError:
            noticed += 1
        content[position] ^= bit
    return f"noticed at {noticed} of {len(content)} places", noticed == len(content)


def second_run(folder, flags, kills, moments):
    """Start two runs into one folder."""
    first = child([*flags, f"--output={folder / 'one'}"], folder / "log")
    while not (folder / "one" / "checkpoints").exists():
        time.sleep(0.01)
    codes = [wait(child([*flags, f"--output={folder / 'one'}"], folder / "second"))]
    codes.append(wait(child(["--resume", str(folder / "one")], folder / "second")))
    ended = wait(first)
    said = (folder / "second").read_text()
    held = codes == [2, 2] and ended == 0 and "another process is writing" in said
    return f"refused, resumed too; the first ends with exit code {ended}", held


def files(run: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest last."""
    return sorted((run / "checkpoints").glob("step-*.pt"))


def same_run(left: Path, right: Path) -> bool:
    """Whether two runs have the same metrics and their last checkpoints the same bits."""
    metrics = [
        [[getattr(row, name) for name in TRAINING] for row in read_metrics(run)]
        for run in (left, right)
    ]
    return metrics[0] == metrics[1] and same(state(left), state(right))


def state(run: Path) -> dict:
    """Return what a run's newest checkpoint holds, but for times."""
    content = unsealed(files(run)[-1].read_bytes())
    state = torch.load(io.BytesIO(content), weights_only=True)
    del state["seconds"], state["parts"]["records"]
    return state


def same(left: object, right: object) -> bool:
    """Whether two nested states hold the same bits."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.numpy().tobytes() == right.numpy().tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


if __name__ == "__main__":
    main()
