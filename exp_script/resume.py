"""Going on with a run: ``run_models.py --resume DIR``."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from flags import Parser, UsageError
from halp.data import Batches, DataError, Dataset
from halp.messages import shortened
from halp.optim.base import Solver
from halp.training import Checkpointer, RecordError, RunFolder, read_config
from settings import Settings, parse

CHANGEABLE = (
    "n_epochs",
    "checkpoint_every",
    "data_dir",
    "offset_cache_dir",
    "on_overflow",
    "resnet_save_epochs",
)
"""Settings that change no number; those of others would make it another run."""

PATHS = ("data_dir", "offset_cache_dir", "resnet_save_folder", "resnet_load_folder")

_NOT_FLAGS = ("command", "resume")


def settings_of(argv: Sequence[str] | None = None) -> Settings:
    """Turn a command line into settings; with ``--resume`` they are those of that run.

    Raises:
        UsageError: it cannot be carried out, or changes a flag that would change numbers.
        RecordError: the folder holds no run, or its configuration cannot be read.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", type=Path)
    args, others = parser.parse_known_args(argv)
    return parse(argv) if args.resume is None else _resumed(args.resume, others)


def command(settings: Settings) -> str | None:
    """Return the command that goes on with a run; None without an output folder."""
    if settings.output is None:
        return None
    script = os.path.relpath(Path(__file__).with_name("run_models.py"))
    return shlex.join(["python", script, "--resume", settings.output])


def own_save_epochs(settings: Settings) -> tuple[int, ...]:
    """Return after which epochs the run may have saved a checkpoint before it was resumed.

    Not those that ``settings`` has in addition: another run may have saved there since.
    """
    if not settings.resume or settings.output is None:
        return ()
    return _stored(Path(settings.output)).resnet_save_epochs


def configuration(settings: Settings, data: Dataset, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return what ``config.json`` holds of a new run."""
    return {
        "settings": _plain(settings),
        "versions": dict(versions),
        "data": _fingerprint(data),
    }


def _plain(settings: Settings) -> dict[str, Any]:
    absolute: dict[str, Any] = {
        name: str(Path(path).absolute())
        for name in PATHS
        if (path := getattr(settings, name)) is not None
    }
    return dataclasses.asdict(dataclasses.replace(settings, resume=False, **absolute))


def checkpointer(
    settings: Settings,
    folder: RunFolder | None,
    model: nn.Module,
    optimizer: Solver,
    batches: Batches,
    say: Callable[[str], object],
    **others: Any,
) -> Checkpointer:
    """Make what makes checkpoints of a run; without an output folder it makes none."""
    if folder is None:
        return Checkpointer(None, model, optimizer, batches, **others)
    every = settings.checkpoint_every or ""
    epochs = every.endswith("e")
    return Checkpointer(
        folder.folder / "checkpoints",
        model,
        optimizer,
        batches,
        every=None if epochs else int(every),
        every_epochs=int(every[:-1]) if epochs else None,
        say=say,
        records=folder,
        **others,
    )


def restore(
    checkpointer: Checkpointer,
    folder: RunFolder,
    settings: Settings,
    data: Dataset,
    versions: Mapping[str, str],
    say: Callable[[str], object],
) -> bool:
    """Bring a run back to its last checkpoint; return whether there is something left to do.

    Args:
        say: is told where the run goes on.

    Raises:
        DataError: the data is not what the run began with.
        CheckpointError: no checkpoint can be used.
    """
    _check_data(folder.config, data)
    for line in _changed_versions(folder.config, versions):
        say(line)
    if not checkpointer.restore():
        say("there is no checkpoint yet: the run starts from the beginning")
    elif checkpointer.epoch >= settings.n_epochs:
        say(f"the run is finished; --n-epochs={2 * settings.n_epochs} would make it longer")
        return False
    else:
        say(f"goes on in epoch {checkpointer.epoch + 1}, after {checkpointer.steps} steps in all")
    # One that was last, and is no longer.
    folder.keep(lambda r: r.epoch % settings.measure_every == 0 or r.epoch == settings.n_epochs)
    folder.configure({**folder.config, "settings": _plain(settings)})
    return True


def _check_data(config: Mapping[str, Any], data: Dataset) -> None:
    """Raise DataError unless this is the data that the run began with."""
    if config.get("data") != _fingerprint(data):
        raise DataError(
            f"{data.name} is not what the run began with, whose results would mix two data sets: "
            "bring the files back that it had, name their folder with --data-dir, or start a new "
            "run"
        )


def _changed_versions(config: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """Say which versions are others than those that the run began with."""
    before = config.get("versions", {})
    return [
        f"{name} is {now}, but the run began with {shortened(before.get(name))}: the last "
        "bits may differ"
        for name, now in versions.items()
        if before.get(name) != now
    ]


def _resumed(folder: Path, others: Sequence[str]) -> Settings:
    stored = _stored(folder)
    before, after = parse(stored.command), parse([*stored.command, *others])
    changes = {}
    for field in dataclasses.fields(Settings):
        name, value = field.name, getattr(after, field.name)
        if name in _NOT_FLAGS or value in (getattr(before, name), getattr(stored, name)):
            continue
        if name not in CHANGEABLE:
            raise UsageError(
                f"{_flag(name)}={shortened(value)} would change the run in {folder}, which has "
                f"{_flag(name)}={shortened(getattr(stored, name))}: leave it out, or start a "
                "new run"
            )
        changes[name] = value
    if changes.get("n_epochs", stored.n_epochs) < stored.n_epochs:
        raise UsageError(
            f"--n-epochs={changes['n_epochs']} is less than the {stored.n_epochs} of the run in "
            f"{folder}: a run can only become longer"
        )
    return dataclasses.replace(
        stored,
        **changes,
        command=(*stored.command, *others),
        output=str(folder),
        resume=True,
    )


def _stored(folder: Path) -> Settings:
    values = read_config(folder).get("settings")
    names = {field.name for field in dataclasses.fields(Settings)}
    if not isinstance(values, dict) or values.keys() != names:
        raise RecordError(
            f"{folder / 'config.json'} is not of this version of halp: go on with the version that "
            "the run began with"
        )
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Settings(**fields)


def _flag(name: str) -> str:
    renamed = {"T": "-T", "resnet_load_epoch": "--resnet-load-ckpt-epoch-id"}
    renamed |= {f"resnet_{do}_folder": f"--resnet-{do}-ckpt-path" for do in ("save", "load")}
    return renamed.get(name, f"--{name.replace('_', '-')}")


def _fingerprint(data: Dataset) -> str:
    """Return a hash of all inputs and labels."""
    digest = hashlib.sha256()
    for tensor in (data.train_inputs, data.train_labels, data.test_inputs, data.test_labels):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
