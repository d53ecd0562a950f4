"""What a run leaves behind: ``config.json`` and ``metrics.jsonl``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halp.decoding import TextError, lines_of
from halp.messages import quoted, reason_of
from halp.training.durable import is_locked, locked, remove_unfinished, write_whole
from halp.training.metrics import Measures


class RecordError(ValueError):
    """A run folder that cannot be written; the message says why and what to do."""


@dataclass(frozen=True)
class EpochRecord:
    """One row of a run's metrics; the fields are the keys of ``metrics.jsonl``, in order."""

    epoch: int  # 0: before training
    train_loss: float  # the measured quantities: see `halp.training.Measures`
    grad_norm: float
    test_loss: float
    test_accuracy: float
    seconds: float  # training time of this epoch, measuring excluded

    @classmethod
    def of(cls, *, epoch: int, measures: Measures, seconds: float) -> EpochRecord:
        """Make the record of an epoch."""
        return cls(epoch=epoch, **dataclasses.asdict(measures), seconds=seconds)

    def to_json(self) -> str:
        """One line of JSON, in which a number that is not finite is null."""
        values = dataclasses.asdict(self)
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        return json.dumps(finite, allow_nan=False)


class RunFolder:
    """A folder that receives one run; rows are on disk as soon as they are written.

    Every file is always whole. The folder is locked until `close`: another run into it is refused.
    Its rows are part of a checkpoint (``state_dict``), and loading one sets them back.

    Args:
        folder: created, with its parents, if it does not exist.
        config: settings of the run, written to ``config.json``; None: those of the run that is
            there already, whose rows begin anew unless a checkpoint's are loaded.

    Attributes:
        records: the rows.

    Raises:
        RecordError: the folder cannot be written, or already holds a run (or, without ``config``,
            holds none), or another process is writing into it.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any] | None) -> None:
        self.folder = folder
        self.records: list[EpochRecord] = []
        try:
            if config is None:
                self.config = read_config(folder)
                self._lock(folder)
                remove_unfinished(folder)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                self._refuse_a_run(folder)
                self._lock(folder)
                self._refuse_a_run(folder)  # that began meanwhile
                self.configure(config)
                self._write_rows()
        except OSError as error:
            raise RecordError(
                f"the output folder {folder} cannot be written: {reason_of(error)}"
            ) from error

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock_held.close()

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write ``config.json``.

        Raises:
            RecordError: it cannot be written.
        """
        self._write("config.json", json.dumps(config, indent=2) + "\n")
        self.config = json.loads(json.dumps(config))

    def write(self, record: EpochRecord) -> None:
        """Append one row to ``metrics.jsonl``.

        Raises:
            RecordError: it cannot be written; the rows before are kept.
        """
        self.records.append(record)
        self._write_rows()

    def keep(self, wanted: Callable[[EpochRecord], bool]) -> None:
        """Drop the rows that are not wanted, on disk too.

        Raises:
            RecordError: as in `write`.
        """
        self.records = [record for record in self.records if wanted(record)]
        self._write_rows()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows."""
        return {"records": [dataclasses.asdict(record) for record in self.records]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the rows those of ``state``; on disk with the next `write` or `keep`."""
        self.records = [EpochRecord(**row) for row in state["records"]]

    def _write_rows(self) -> None:
        self._write("metrics.jsonl", "".join(f"{record.to_json()}\n" for record in self.records))

    def _write(self, name: str, text: str) -> None:
        path, content = self.folder / name, text.encode()
        try:
            if not path.exists() or path.read_bytes() != content:
                write_whole(path, content)
        except OSError as error:
            raise RecordError(f"{path} cannot be written: {reason_of(error)}") from error

    def _refuse_a_run(self, folder: Path) -> None:
        for name in ("metrics.jsonl", "config.json"):
            if (folder / name).exists():
                if is_locked(folder):
                    raise _in_use(folder)
                raise RecordError(
                    f"{folder} already holds a run ({name}): name another output folder, or go on "
                    f"with that run with --resume"
                )

    def _lock(self, folder: Path) -> None:
        self._lock_held = contextlib.ExitStack()
        try:
            self._lock_held.enter_context(locked(folder))
        except BlockingIOError as error:
            raise _in_use(folder) from error


def _in_use(folder: Path) -> RecordError:
    return RecordError(f"another process is writing a run into {folder}: wait for its end")


def read_config(folder: Path) -> dict[str, Any]:
    """Read back a run's ``config.json``.

    Raises:
        RecordError: there is no run in the folder, or its file cannot be read.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())  # of any of JSON's encodings, marked or not
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RecordError(f"{folder} holds no run: there is no {path.name} in it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read: {reason_of(error)}") from error
    if not isinstance(config, dict):
        raise RecordError(f"{path} cannot be read: it is no configuration of a run")
    return config


def read_metrics(folder: Path) -> list[EpochRecord]:
    """Read back a run's rows; null becomes NaN.

    Raises:
        RecordError: the file is not there or cannot be read, or a line of it is no row.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = list(lines_of(path.read_bytes(), str(path)))
    except TextError as error:
        raise RecordError(str(error)) from error
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {reason_of(error)}") from error
    return [_row(line, where) for where, line in lines if line.strip()]


def _row(line: str, where: str) -> EpochRecord:
    names = {field.name for field in dataclasses.fields(EpochRecord)}
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    whole = isinstance(row, dict) and row.keys() == names
    if not whole or not all(v is None or type(v) in (int, float) for v in row.values()):
        raise RecordError(f"{where}: a row of a run's metrics must stand here, not {quoted(line)}")
    numbers: dict[str, Any] = {k: math.nan if v is None else v for k, v in row.items()}
    return EpochRecord(**numbers)
