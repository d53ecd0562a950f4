"""What a run leaves behind: ``config.json`` and ``metrics.jsonl``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    Args:
        folder: created, with its parents, if it does not exist.
        config: settings of the run, written to ``config.json``.

    Raises:
        RecordError: the folder cannot be written, or already holds a run.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.jsonl", "config.json"):
                if (folder / name).exists():
                    raise RecordError(
                        f"{folder} already holds a run ({name}): name another output folder"
                    )
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            self._metrics = (folder / "metrics.jsonl").open("x")
        except OSError as error:
            raise RecordError(
                f"the output folder {folder} cannot be written: {error.strerror}"
            ) from error

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._metrics.close()

    def write(self, record: EpochRecord) -> None:
        """Append one row to ``metrics.jsonl``."""
        self._metrics.write(record.to_json() + "\n")
        self._metrics.flush()


def read_metrics(folder: Path) -> list[EpochRecord]:
    """Read back a run's rows; null becomes NaN."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for row in rows:
        row.update({key: math.nan for key, value in row.items() if value is None})
    return [EpochRecord(**row) for row in rows]
