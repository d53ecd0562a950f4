#!/usr/bin/env python3
"""Train one model with one solver: ``python exp_script/run_models.py --help``."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import halp
from halp.data import Batches, DataError, Dataset
from halp.optim.base import Solver
from halp.training import EpochRecord, RecordError, RunFolder, measure, train
from settings import Settings, UsageError, parse
from tables import DATASETS, MODELS, SOLVERS

MISTAKES = (UsageError, DataError, RecordError)
"""What a person can put right; shown as one sentence. Anything else is a bug, with a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    try:
        settings = parse(argv)
        run(settings, announce=_say, report=lambda record: _say(_line(record, settings.n_epochs)))
    except MISTAKES as mistake:
        print(f"run_models.py: error: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run_models.py: interrupted; what was measured so far is kept", file=sys.stderr)
        return 130
    return 0


def run(
    settings: Settings,
    announce: Callable[[str], object] = lambda line: None,
    report: Callable[[EpochRecord], object] = lambda record: None,
) -> list[EpochRecord]:
    """Carry out one run and return what was measured.

    Args:
        settings: of the run.
        announce: is told, before training, what is about to run; and what happened in it.
        report: is given every record as soon as it exists.

    Raises:
        UsageError, DataError, RecordError: something that the person who asked can put right.
    """
    data = _load(settings)
    batches, test = _batches(data, settings)
    settings = _resolved(settings, data, batches)
    torch.manual_seed(settings.seed)
    model = MODELS[settings.model](data).to(settings.device)
    optimizer = _solver(model, settings)
    records = []
    with _output(settings) as folder, _progress(settings, len(batches)) as bar:
        announce(_description(settings, data, len(batches)))
        for record in train(
            model,
            optimizer,
            batches,
            cross_entropy,
            epochs=settings.n_epochs,
            measure=lambda: measure(
                model,
                batches,
                test,
                cross_entropy,
                weight_decay=settings.reg,
                dtype=settings.dtype,
            ),
            measure_every=settings.measure_every,
            after_step=bar.update,
        ):
            records.append(record)
            if folder is not None:
                folder.write(record)
            report(record)
    saturated = getattr(optimizer, "saturated", 0)
    if saturated:
        announce(
            f"fixed point: z went beyond its range {saturated} times; a smaller --mu widens it"
        )
    return records


def _load(settings: Settings) -> Dataset:
    data = DATASETS[settings.dataset](Path(settings.data_dir))
    if settings.limit_train is not None:
        data = data.first(settings.limit_train)
    if settings.n_classes is not None:
        data = dataclasses.replace(data, n_classes=settings.n_classes)
    return data


def _batches(data: Dataset, settings: Settings) -> tuple[Batches, Batches]:
    """Training and test batches on the run's device; only the training ones are ever shuffled."""
    data = data.to(settings.device, settings.dtype)
    train = Batches(
        data.train_inputs,
        data.train_labels,
        settings.batch_size,
        shuffle=settings.shuffle,
        seed=settings.seed,
    )
    return train, Batches(data.test_inputs, data.test_labels, settings.batch_size)


def _resolved(settings: Settings, data: Dataset, batches: Batches) -> Settings:
    """Fill in the settings that the data decides."""
    one_epoch = len(batches) if SOLVERS[settings.solver].outer_loop else None
    return dataclasses.replace(
        settings,
        T=settings.T or one_epoch,
        n_classes=data.n_classes,
        limit_train=len(data.train_labels),
    )


def _solver(model: nn.Module, settings: Settings) -> Solver:
    """Make the solver; the model is brought into the form that it trains."""
    entry = SOLVERS[settings.solver]
    if not entry.bit_centered:
        model.to(settings.dtype)  # else deltas stay float32; only offsets are held more precisely
    options: dict[str, Any] = {
        "lr": settings.alpha,
        "momentum": settings.momentum,
        "weight_decay": settings.reg,
    }
    arithmetic: dict[str, Any] = {
        "format": settings.format,
        "rounding": settings.rounding,
        "scale": None if settings.scale == "none" else settings.scale,
        "seed": settings.seed,
    }
    try:
        if entry.bit_centered:
            halp.bit_center(model, **arithmetic, offset_dtype=settings.dtype)
        elif entry.rounds:
            options |= arithmetic
        if settings.mu is not None:
            options["mu"] = settings.mu
        if entry.outer_loop:
            options |= {"T": settings.T, "buffers": list(model.buffers())}
        solver: Solver = entry.optimizer(model.parameters(), **options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return solver


def _output(settings: Settings) -> contextlib.AbstractContextManager[RunFolder | None]:
    if settings.output is None:
        return contextlib.nullcontext()
    config = {"settings": dataclasses.asdict(settings), "versions": _versions()}
    return RunFolder(Path(settings.output), config)


def _versions() -> dict[str, str]:
    return {
        "halp": metadata.version("halp"),
        "torch": str(torch.__version__),  # names the CUDA build, which the package's version lacks
        "numpy": metadata.version("numpy"),
        "python": platform.python_version(),
    }


def _progress(settings: Settings, steps_per_epoch: int) -> Any:
    """A bar under the lines; none where stderr is not a terminal."""
    return tqdm(
        total=settings.n_epochs * steps_per_epoch,
        desc=settings.solver,
        unit="step",
        file=sys.stderr,
        disable=None,
        leave=False,
    )


def _say(line: str) -> None:
    with tqdm.external_write_mode(file=sys.stdout):
        print(line, flush=True)


def _description(settings: Settings, data: Dataset, steps_per_epoch: int) -> str:
    parts = [
        f"{settings.solver} on {settings.dataset}, {settings.model}",
        f"{len(data.train_labels)} training samples, {steps_per_epoch} steps an epoch",
    ]
    if settings.T is not None:
        parts.append(f"T = {settings.T}")
    if settings.format is not None:
        parts.append(f"{settings.format}, {settings.rounding}, scale {settings.scale}")
    if settings.mu is not None:
        parts.append(f"mu = {settings.mu:g}")
    return "; ".join(parts)


def _line(record: EpochRecord, n_epochs: int) -> str:
    width = len(str(n_epochs))
    return (
        f"epoch {record.epoch:{width}d}/{n_epochs}   train loss {record.train_loss:.8f}   "
        f"gradient norm {record.grad_norm:.2e}   test loss {record.test_loss:.5f}   "
        f"accuracy {record.test_accuracy:.2%}   {record.seconds:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
