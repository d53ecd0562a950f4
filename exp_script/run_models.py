#!/usr/bin/env python3
"""Train one model with one solver: ``python exp_script/run_models.py --help``."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import platform
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import MultiStepLR
from tqdm import tqdm

import halp
import resume
from flags import UsageError
from halp import formats
from halp.bitcenter import NoRoomError
from halp.data import Batches, DataError, Dataset, crop_and_flip, trim_padding
from halp.messages import WHOLE, reason_of, shortened
from halp.models import ResNet18
from halp.optim.base import Solver
from halp.training import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    Diverged,
    EpochRecord,
    RecordError,
    RunFolder,
    Watch,
    measure,
    train,
)
from interrupts import Interrupted, ended_in_a_sentence
from settings import Settings
from tables import DATASETS, MODELS, SOLVERS

MISTAKES = (UsageError, DataError, RecordError, CheckpointError, NoRoomError)
"""What a person can put right; shown as one sentence. Anything else is a bug, with a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    try:
        settings = resume.settings_of(argv)
        run(settings, announce=_say, report=lambda record: _say(_line(record, settings.n_epochs)))
    except MISTAKES as mistake:
        print(f"run_models.py: error: {shortened(mistake, WHOLE)}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"run_models.py: {stop}", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("run_models.py: interrupted; what was measured so far is kept", file=sys.stderr)
        return 130
    except Diverged as end:
        print(f"run_models.py: the run has diverged: {end}", file=sys.stderr)
        return 1
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
        UsageError, DataError, RecordError, CheckpointError, NoRoomError: something that the person
            who asked can put right.
        Interrupted: by SIGINT or SIGTERM.
        Diverged: there was NaN or infinity, and ``settings.on_overflow`` is "stop".
    """
    data = _load(settings)
    batches, measured, test = _batches(data, settings)
    settings = _resolved(settings, data, batches)
    _seed(settings.seed)
    model = _model(data, settings)
    checkpoint = _loaded(model, data, settings)
    optimizer = _solver(model, settings)
    if checkpoint is not None:
        checkpoint.load_momentum(model, optimizer)
    watch = Watch(model, optimizer, on_overflow=settings.on_overflow, report=announce)
    scheduler = MultiStepLR(optimizer, list(settings.resnet_lr_drops), gamma=0.1)
    after_epoch = _after_epoch(model, optimizer, scheduler, data, settings)
    with _output(settings, data) as folder:
        announce(_description(settings, data, len(batches)))
        for line in _notes(settings, checkpoint):
            announce(line)
        checkpointer = resume.checkpointer(
            settings,
            folder,
            model,
            optimizer,
            batches,
            announce,
            scheduler=scheduler,
            watch=watch,
        )
        if folder is not None and settings.resume:
            going_on = resume.restore(checkpointer, folder, settings, data, _versions(), announce)
            if not going_on:
                return folder.records
        records = [] if folder is None else list(folder.records)
        with (
            _progress(settings, len(batches), checkpointer.steps) as bar,
            ended_in_a_sentence(checkpointer.stop, resume.command(settings)),
            _logged(announce),
        ):
            for record in train(
                model,
                optimizer,
                batches,
                cross_entropy,
                epochs=settings.n_epochs,
                measure=lambda: measure(
                    model,
                    measured,
                    test,
                    cross_entropy,
                    weight_decay=settings.reg,
                    dtype=settings.dtype,
                ),
                measure_every=settings.measure_every,
                after_step=bar.update,
                after_epoch=after_epoch,
                checkpointer=checkpointer,
            ):
                records.append(record)
                if folder is not None:
                    folder.write(record)
                report(record)
    for line in watch.summary():
        announce(line)
    return records


@contextlib.contextmanager
def _logged(announce: Callable[[str], object]) -> Iterator[None]:
    """Within the block, what halp logs is announced: how many bytes cached offsets take."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            announce(record.getMessage())

    logger, handler = logging.getLogger("halp"), Handler()
    before, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = propagate


def _seed(seed: int) -> None:
    """Start all global random numbers; what else is drawn has generators of its own."""
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def _load(settings: Settings) -> Dataset:
    try:
        data = DATASETS[settings.dataset](Path(settings.data_dir))
    except OSError as error:
        raise DataError(f"{settings.data_dir} cannot be read: {reason_of(error)}") from error
    if settings.limit_train is not None:
        data = data.first(settings.limit_train)
    if settings.n_classes is not None:
        data = dataclasses.replace(data, n_classes=settings.n_classes)
    return MODELS[settings.model].prepare(data)


def _batches(data: Dataset, settings: Settings) -> tuple[Batches, Batches, Batches]:
    """Batches on the run's device: to train on, and training and test data to measure on.

    What is measured is never shuffled or augmented.
    """
    data = data.to(settings.device, settings.dtype)
    trim = None if data.n_words is None else trim_padding
    size = settings.batch_size
    train = Batches(
        data.train_inputs,
        data.train_labels,
        size,
        shuffle=settings.shuffle,
        seed=settings.seed,
        transform=crop_and_flip if settings.augment else trim,
    )
    measured = Batches(data.train_inputs, data.train_labels, size, transform=trim)
    return train, measured, Batches(data.test_inputs, data.test_labels, size, transform=trim)


def _resolved(settings: Settings, data: Dataset, batches: Batches) -> Settings:
    """Fill in the settings that the data decides."""
    one_epoch = len(batches) if SOLVERS[settings.solver].outer_loop else None
    return dataclasses.replace(
        settings,
        T=settings.T or one_epoch,
        n_classes=data.n_classes,
        limit_train=len(data.train_labels),
    )


def _model(data: Dataset, settings: Settings) -> nn.Module:
    """A new model on the run's device, in the dtype that its solver trains."""
    model = MODELS[settings.model].build(data, **_options(settings)).to(settings.device)
    if not SOLVERS[settings.solver].bit_centered:
        model.to(settings.dtype)  # else deltas stay float32; only offsets are held more precisely
    return model


def _options(settings: Settings) -> dict[str, int]:
    """What the model is built with beside data."""
    return {} if settings.resnet_width is None else {"width": settings.resnet_width}


def _loaded(model: nn.Module, data: Dataset, settings: Settings) -> Checkpoint | None:
    """Load the checkpoint that the run starts from, if any, into the model."""
    if settings.resnet_load_epoch is None:
        return None
    folder = CheckpointFolder(Path(settings.resnet_load_folder or ""), settings.model)
    checkpoint = folder.read(settings.resnet_load_epoch)
    checkpoint.check_architecture(
        _architecture(data, settings),
        flags={"width": "--resnet-width", "n_classes": "--n-classes"},
    )
    checkpoint.load_model(model)
    if settings.resnet_fine_tune:
        cast(ResNet18, model).freeze_features()
    return checkpoint


def _solver(model: nn.Module, settings: Settings) -> Solver:
    """Make the solver; the model is bit-centered if that is what it trains."""
    entry = SOLVERS[settings.solver]
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
            halp.bit_center(
                model,
                **arithmetic,
                offsets="on-site" if settings.on_site_compute else "cached",
                offset_dtype=settings.dtype,
                offset_cache_dir=settings.offset_cache_dir,
            )
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


def _after_epoch(
    model: nn.Module,
    optimizer: Solver,
    scheduler: MultiStepLR,
    data: Dataset,
    settings: Settings,
) -> Callable[[int], object]:
    """What happens at the end of an epoch: a checkpoint where one is due, then the schedule.

    Raises:
        CheckpointError: a checkpoint of the run could not be written.
    """
    checkpoints = CheckpointFolder(Path(settings.resnet_save_folder or ""), settings.model)
    if settings.resnet_save_epochs:
        own = resume.own_save_epochs(settings)
        checkpoints.prepare(settings.resnet_save_epochs, own=own)

    def after_epoch(epoch: int) -> None:
        if epoch in settings.resnet_save_epochs:
            checkpoint = Checkpoint.of(
                model,
                optimizer,
                architecture=_architecture(data, settings),
                origin=_origin(epoch, optimizer, settings),
            )
            checkpoints.write(epoch, checkpoint)
        scheduler.step()

    return after_epoch


def _architecture(data: Dataset, settings: Settings) -> dict[str, Any]:
    return {
        "name": settings.model,
        **_options(settings),
        "in_channels": data.input_shape[0],
        "n_classes": data.n_classes,
    }


def _origin(epoch: int, optimizer: Solver, settings: Settings) -> dict[str, Any]:
    versions = _versions()
    return {
        "solver": settings.solver,
        "format": settings.format,
        "rounding": settings.rounding,
        "dataset": settings.dataset,
        "seed": settings.seed,
        "epoch": epoch,
        "learning rate": optimizer.param_groups[0]["lr"],
        "momentum": settings.momentum,
        "halp": versions["halp"],
        "torch": versions["torch"],
    }


def _output(
    settings: Settings, data: Dataset
) -> contextlib.AbstractContextManager[RunFolder | None]:
    if settings.output is None:
        return contextlib.nullcontext()
    config = None if settings.resume else resume.configuration(settings, data, _versions())
    return RunFolder(Path(settings.output), config)


def _versions() -> dict[str, str]:
    return {
        "halp": metadata.version("halp"),
        "torch": str(torch.__version__),  # names the CUDA build, which the package's version lacks
        "numpy": metadata.version("numpy"),
        "python": platform.python_version(),
    }


def _progress(settings: Settings, steps_per_epoch: int, done: int) -> Any:
    """A bar under the lines; none where stderr is not a terminal."""
    return tqdm(
        total=settings.n_epochs * steps_per_epoch,
        initial=done,
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
        f"alpha {settings.alpha:g}, momentum {settings.momentum:g}, reg {settings.reg:g}",
    ]
    if settings.T is not None:
        parts.append(f"T = {settings.T}")
    if settings.format is not None:
        parts.append(f"{settings.format}, {settings.rounding}, scale {settings.scale}")
    if SOLVERS[settings.solver].bit_centered:
        parts.append(f"offsets {'on site' if settings.on_site_compute else 'cached'}")
    if settings.mu is not None:
        parts.append(f"mu = {settings.mu:g}")
    return "; ".join(parts)


def _notes(settings: Settings, checkpoint: Checkpoint | None) -> list[str]:
    """What else a person should know about the run before it starts."""
    notes = []
    if checkpoint is not None:
        notes.append(f"starts from epoch {settings.resnet_load_epoch}: {checkpoint}")
        if checkpoint.momentum and settings.momentum == 0:
            notes.append("the checkpoint's momentum is left out, since --momentum is 0")
    if settings.resnet_fine_tune:
        notes.append("only the last layer trains; all else is frozen, in evaluation mode")
    format = formats.get(settings.format) if settings.format else None
    if settings.scale == "none" and isinstance(format, formats.FixedFormat):
        notes.append(
            f"{settings.format} with scale none holds whole numbers only: --scale=0.03125 would be "
            "steps of 1/32"
        )
    return notes


def _line(record: EpochRecord, n_epochs: int) -> str:
    width = len(str(n_epochs))
    return (
        f"epoch {record.epoch:{width}d}/{n_epochs}   train loss {record.train_loss:.8f}   "
        f"gradient norm {record.grad_norm:.2e}   test loss {record.test_loss:.5f}   "
        f"accuracy {record.test_accuracy:.2%}   {record.seconds:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
