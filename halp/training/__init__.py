"""Training loop, measurements, records and checkpoints of a run, and figures."""

from halp.training.checkpointer import Checkpointer, Stopped
from halp.training.checkpoints import Checkpoint, CheckpointError, CheckpointFolder
from halp.training.figures import plot_convergence
from halp.training.loop import train
from halp.training.metrics import (
    Criterion,
    Measures,
    measure,
    measure_test,
    measure_training,
)
from halp.training.records import EpochRecord, RecordError, RunFolder, read_config, read_metrics
from halp.training.watch import Counts, Diverged, Watch

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointFolder",
    "Checkpointer",
    "Counts",
    "Criterion",
    "Diverged",
    "EpochRecord",
    "Measures",
    "RecordError",
    "RunFolder",
    "Stopped",
    "Watch",
    "measure",
    "measure_test",
    "measure_training",
    "plot_convergence",
    "read_config",
    "read_metrics",
    "train",
]
