"""Training that can be killed at any moment and goes on bit for bit from its checkpoint."""

from __future__ import annotations

import io
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from halp.messages import quoted, reason_of
from halp.optim.preserve import RandomState, generators_of
from halp.training.checkpoints import LOADING_ERRORS, CheckpointError
from halp.training.durable import (
    DamagedError,
    read_sealed,
    remove_unfinished,
    write_sealed,
)

KEPT = 2
"""Checkpoints in a folder: the newest, and the one before, should the newest be damaged."""


class Stateful(Protocol):
    """Whatever has a state dict of tensors and plain values: models, optimizers, schedulers, …"""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load what `state_dict` returned."""


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """Raised between two steps after `Checkpointer.stop`, with a checkpoint made."""


class Checkpointer:
    """Drives a training loop, and makes checkpoints from which it goes on bit for bit::

        checkpointer = Checkpointer("checkpoints", model, optimizer, loader, every=500)
        checkpointer.restore()
        for epoch in checkpointer.epochs(10):
            for x, y in checkpointer.batches():
                ...  # one step
            ...  # what comes after an epoch: schedulers, evaluation

    A checkpoint holds the state dicts of the model, the optimizer and ``others``, the position in
    the epoch, and all random state: PyTorch's, Python's, NumPy's and that of the loader's
    generators. In the middle of an epoch the loader is brought back to its place by iterating over
    the batches that have been trained on, from the random state in which the epoch began. Files
    are sealed with a checksum and appear whole; the last two are kept.

    The loader's order must come from the random state alone. With ``persistent_workers=True`` it
    does, but not what a data set draws inside of workers after the first epoch.

    Args:
        folder: of the files; one training at a time may use it. None: nothing is written,
            and `state_dict` is there to be stored elsewhere.
        model: plain or bit-centered.
        optimizer: any solver of `halp.optim`, or another optimizer.
        loader: of the training batches: `halp.data.Batches`, a ``DataLoader``, a list, …
        every: steps between two checkpoints; None: none within an epoch.
        every_epochs: epochs between two checkpoints, made when all that comes after an epoch is
            done; None: none. There is always one after the last epoch.
        say: is told what a person should know: that a damaged file was left out.
        **others: anything with ``state_dict`` and ``load_state_dict``; loaded after the optimizer.

    Attributes:
        epoch: epochs that are over; the number, from 0, of the one under way.
        batch: batches of that epoch that have been trained on.
        steps: batches that have been trained on, of all epochs.
        seconds: time that the batches of the epoch have taken, over all runs, checkpoints excluded.
        resumed: whether a state has been loaded.

    Raises:
        ValueError: ``every`` or ``every_epochs`` is below 1.
    """

    def __init__(
        self,
        folder: Path | str | None,
        model: Stateful,
        optimizer: Stateful,
        loader: Iterable[Any],
        *,
        every: int | None = None,
        every_epochs: int | None = None,
        say: Callable[[str], object] = warnings.warn,
        **others: Stateful,
    ) -> None:
        for name, number in (("every", every), ("every_epochs", every_epochs)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1 or None, not {quoted(number)}")
        self.folder = None if folder is None else Path(folder)
        self.loader = loader
        self.every = every
        self.every_epochs = every_epochs
        self.epoch = self.batch = self.steps = 0
        self.seconds = 0.0
        self.resumed = False
        self._say = say
        # A model's state is w̃ + z; that of its optimizer, loaded after it, both of them.
        self._parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer, **others}
        self._generators = generators_of(loader)
        self._epoch_start: RandomState | None = None  # None unless batches of an epoch are done
        self._loaded: RandomState | None = None  # that of a loaded state, until training goes on
        self._saved: tuple[int, int] | None = None  # the position of the last checkpoint
        self._in_epoch = False
        self._stopping = False

    # The loop.

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs up to ``count`` that are not over yet.

        Raises:
            CheckpointError: a checkpoint cannot be written, or there are some of another training.
            Stopped: `stop` was called.
        """
        self._check_folder()
        if self._loaded is not None:
            self._loaded.restore()
        while self.epoch < count:
            if self._stopping:
                self._stop()
            self._in_epoch = True
            yield self.epoch
            self._in_epoch = False
            self.epoch += 1
            self.batch, self.seconds = 0, 0.0
            self._epoch_start = self._loaded = None
            if self.every_epochs is not None and self.epoch % self.every_epochs == 0:
                self._save()
        self._save()

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the epoch that have not been trained on yet.

        A batch counts as trained on when the next one is asked for.

        Raises:
            RuntimeError: this is not inside of `epochs`, or the second time in one epoch.
            CheckpointError: as in `epochs`; or the loader ends before the checkpoint's batch.
            Stopped: `stop` was called.
        """
        iterator = self._iterator()
        started = _clock()
        for batch in iterator:
            yield batch
            self.batch += 1
            self.steps += 1
            due = self.every is not None and self.steps % self.every == 0
            if due or self._stopping:
                self.seconds += _clock() - started
                self._save()
                if self._stopping:
                    self._stop()
                started = _clock()
        self.seconds += _clock() - started

    def stop(self) -> None:
        """Ask for the end of training after the step under way; a signal handler may call it.

        `batches` or `epochs` then make a checkpoint and raise `Stopped`.
        """
        self._stopping = True

    def _iterator(self) -> Iterator[Any]:
        """Begin an epoch; or bring the loader to the batch that follows those that are done."""
        loaded, self._loaded = self._loaded, None
        if not self._in_epoch or (self._epoch_start is not None and loaded is None):
            raise RuntimeError(
                "batches() belongs inside of `for epoch in checkpointer.epochs(…)`, once an epoch: "
                "a checkpoint could not tell the passes apart"
            )
        if self._epoch_start is None or loaded is None:
            self._epoch_start = RandomState(self._generators)
            return iter(self.loader)
        self._epoch_start.restore()
        iterator = iter(self.loader)
        skipped = sum(1 for _ in islice(iterator, self.batch))
        if skipped < self.batch:
            raise CheckpointError(
                f"the checkpoint was made after {self.batch} batches of an epoch, but the loader "
                f"has only {skipped}: use the data and the batch size of that training"
            )
        loaded.restore()
        return iterator

    # Files.

    def save(self) -> None:
        """Make a checkpoint now, outside of epochs; inside, ``every`` and ``every_epochs`` do it.

        Raises:
            RuntimeError: an epoch is under way.
            CheckpointError: it cannot be written, or there are some of another training.
        """
        self._check_between_epochs("save")
        self._check_folder()
        self._save(again=True)

    def restore(self) -> bool:
        """Load the newest checkpoint in the folder that is whole; return whether there was one.

        Raises:
            CheckpointError: there are checkpoints but none is whole, or it is not of such a model,
                optimizer, loader and others.
        """
        if self.folder is None:
            return False
        remove_unfinished(self.folder)
        damaged = []
        for path in reversed(_files(self.folder)):
            try:
                content = read_sealed(path)
            except (DamagedError, OSError) as error:
                damaged.append(f"{path.name} is damaged ({reason_of(error)})")
                continue
            for line in damaged:
                self._say(f"{line}: going on from the one before, {path.name}")
            self._load(path, content)
            return True
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used, since {' and '.join(damaged)}: move "
                "them away to start from the beginning"
            )
        return False

    def _load(self, path: Path, content: memoryview) -> None:
        try:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            self.load_state_dict(state)
        except LOADING_ERRORS as error:
            raise CheckpointError(f"{path} is of another training: {reason_of(error)}") from error
        self._saved = (self.epoch, self.batch)

    def _save(self, again: bool = False) -> None:
        """Write the state where training is now, unless that is done."""
        if self.folder is None or (self._saved == (self.epoch, self.batch) and not again):
            return
        content = self._serialized()
        path = self.folder / f"step-{self.steps:09d}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_sealed(path, content)
            files = _files(self.folder)
            last = files.index(path) + 1
            # What seems newer was damaged, and left out by `restore`.
            for old in files[: max(last - KEPT, 0)] + files[last:]:
                old.unlink()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {path} cannot be written: {reason_of(error)}"
            ) from error
        self._saved = (self.epoch, self.batch)

    def _serialized(self) -> memoryview:
        state = self._state()
        file = io.BytesIO()
        torch.save(state, file)
        if self._saved is None:  # the first time, that it can be read is made sure of
            for name, part in state["parts"].items():
                _check_readable(part, name)
        return file.getbuffer()

    def _stop(self) -> None:
        self._save()
        self._in_epoch = False
        raise Stopped(f"training was stopped after {self.steps} steps")

    def _check_folder(self) -> None:
        """Raise CheckpointError if the folder holds checkpoints that are not this training's."""
        if self.folder is not None and self._saved is None and _files(self.folder):
            raise CheckpointError(
                f"{self.folder} holds the checkpoints of another training: call restore() before "
                "the loop to go on with it, or name another folder"
            )

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from, as tensors and plain values.

        The tensors are not copied: they change when training goes on.

        Raises:
            RuntimeError: an epoch is under way. After `Stopped` none is.
        """
        self._check_between_epochs("state_dict")
        return self._state()

    def _check_between_epochs(self, caller: str) -> None:
        if self._in_epoch:
            raise RuntimeError(
                f"{caller}() was called in the middle of an epoch, where only batches() knows what "
                "is done: pass every=… or every_epochs=… to the Checkpointer, call stop(), or "
                "call it outside of epochs()"
            )

    def _state(self) -> dict[str, Any]:
        start = self._epoch_start
        return {
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "epoch": self.epoch,
            "batch": self.batch,
            "steps": self.steps,
            "seconds": self.seconds,
            "epoch_start": None if start is None else start.state_dict(),
            "random": (self._loaded or RandomState(self._generators)).state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state_dict` into the model, the optimizer and all else, random state included.

        Raises:
            ValueError: the state has other parts, or is of a loader with other generators; nothing
                is loaded. Or a part refuses its state.
        """
        parts = state["parts"]
        for name in parts.keys() ^ self._parts.keys():
            holder, lacking = (
                ("state", "Checkpointer") if name in parts else ("Checkpointer", "state")
            )
            raise ValueError(f"the {holder} has a {quoted(name)}, which the {lacking} lacks")
        start = state["epoch_start"]
        loaded = RandomState.from_state_dict(state["random"], self._generators)
        for name, part in self._parts.items():
            part.load_state_dict(parts[name])
        if state["steps"] > 0:  # what PyTorch's schedulers ask for, before they warn
            self._parts["optimizer"]._opt_called = True  # type: ignore[attr-defined]
        self.epoch, self.batch, self.steps = state["epoch"], state["batch"], state["steps"]
        self.seconds = state["seconds"]
        self._epoch_start = start and RandomState.from_state_dict(start, self._generators)
        self._loaded = loaded
        self.resumed = True
        loaded.restore()


def _files(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest last."""
    numbers = {
        int(match[1]): path
        for path in folder.glob("step-*.pt")
        if (match := re.fullmatch(r"step-(\d+)\.pt", path.name))
    }
    return [numbers[n] for n in sorted(numbers)]


def _check_readable(state: Any, name: str) -> None:
    """Raise CheckpointError for a state that could be written but not read."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except LOADING_ERRORS as error:
        raise CheckpointError(
            f"the state of {quoted(name)} holds more than tensors and plain values, and could not "
            f"be read back: {reason_of(error).split(' In PyTorch')[0]}"
        ) from error


def _clock() -> float:
    """Seconds on a clock, once devices that work asynchronously have finished."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
