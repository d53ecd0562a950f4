"""Runs in processes of their own, which can be killed; a new one takes milliseconds."""

import multiprocessing
import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from tables import REPOSITORY

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.exp_script.warmed_up"])


def start(argv: list[str], log: Path, die_at: int | None = None) -> BaseProcess:
    """Start a run that writes its output to ``log``.

    With ``die_at`` it kills itself before the so-many-th of its system calls that write files.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "exp_script"), str(REPOSITORY)])
    try:  # the server inherits it
        process = CONTEXT.Process(target=_run, args=(argv, str(log), die_at))
        process.start()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return process


def ended(process: BaseProcess, seconds: float = 60) -> int | None:
    """Wait for the end of a run; return its exit code."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        raise TimeoutError("the run has not ended")
    return process.exitcode


def _run(argv: list[str], log: str, die_at: int | None) -> None:
    import run_models

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if die_at is not None:
        _kill_before(die_at)
    sys.exit(run_models.main(argv))


def _kill_before(number: int) -> None:
    calls = 0

    def deadly(call):
        def instead(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return instead

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, deadly(getattr(os, name)))
