"""A run that ends early, by a signal or a full disk, says how to go on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from halp.training import CheckpointError, RecordError, Stopped

NOTE = b"\nfinishing the step, or the pass over the data, under way; once more ends at once\n"


class Interrupted(KeyboardInterrupt):
    """A run was ended by a signal; the message is for the person who sent it."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(f"{signal.Signals(signum).name}: {message}")
        self.exit_code = 128 + signum


@contextmanager
def ended_in_a_sentence(stop: Callable[[], object], command: str | None) -> Iterator[None]:
    """Within the block, the first SIGINT or SIGTERM calls ``stop``; a second one ends at once.

    Outside of the main thread, where Python has no signal handlers, signals do what they did.

    Args:
        stop: after which the block raises `Stopped`, when it can.
        command: goes on with the run; None if nothing does.

    Raises:
        Interrupted: in the place of `Stopped`, or at once.
        RecordError, CheckpointError: of the block, with the way on.
    """
    received: list[int] = []
    way_on = f"to go on: {command}" if command else "nothing is kept, since there was no --output"

    def handle(signum: int, frame: FrameType | None) -> None:
        if received:
            raise Interrupted(signum, f"ended at once; {way_on}")
        received.append(signum)
        stop()
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, NOTE)  # print is not reentrant

    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    before = {signum: signal.signal(signum, handle) for signum in signals}
    try:
        yield
    except Stopped as stopped:
        raise Interrupted(received[0], f"{stopped}; {way_on}") from None
    except (RecordError, CheckpointError) as error:
        if command is None:
            raise
        raise type(error)(f"{error}; when that is put right, {way_on}") from error
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
