"""Checkpoints: a model and the momentum of its training, one file an epoch."""

from __future__ import annotations

import io
import pickle
import re
import tempfile
import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor, nn

from halp.messages import SAID, quoted, reason_of, shortened
from halp.optim.base import Solver
from halp.training.durable import remove_unfinished, write_whole

VERSION = 1
"""Of what a file holds; a file with a higher one is refused."""

KIND = "halp checkpoint"

# What torch.load raises for a whole zip file that is not one of its own, or not of plain values.
LOADING_ERRORS = (
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    AssertionError,
)

Plain: TypeAlias = str | int | float | None


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message says why and what would do."""


@dataclass(frozen=True)
class Checkpoint:
    """A plain model's state, and what made it."""

    architecture: dict[str, Plain]  # "name" of the model, and what it was built with
    origin: dict[str, Plain]  # what made it: "epoch", "solver", "dataset", …
    model: dict[str, Tensor]  # the state dict: parameters and buffers
    momentum: dict[str, Tensor]  # buffers by the name of their parameter; any may be missing

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Solver,
        *,
        architecture: Mapping[str, Plain],
        origin: Mapping[str, Plain],
    ) -> Checkpoint:
        """Copy a model as it is now, and its solver's momentum, to the CPU."""
        momentum = {
            name: _copy(optimizer.state[p]["momentum_buffer"])
            for name, p in model.named_parameters()
            if "momentum_buffer" in optimizer.state.get(p, {})
        }
        state = {name: _copy(tensor) for name, tensor in model.state_dict().items()}
        return cls(dict(architecture), dict(origin), state, momentum)

    def __str__(self) -> str:
        """What it holds and what made it."""
        made = ", ".join(f"{key} {v}" for key, v in self.origin.items() if v is not None)
        return f"{_described(self.architecture)}, made with {shortened(made, SAID)}"

    def check_architecture(self, wanted: Mapping[str, Plain], flags: Mapping[str, str]) -> None:
        """Raise `CheckpointError` where this is of another model than is wanted.

        Args:
            wanted: description of the model that this is to be loaded into.
            flags: for entries of it, the option that changes them, to be named in the message.
        """
        there = self.architecture
        differing = [k for k in {**wanted, **there} if there.get(k) != wanted.get(k)]
        if differing:
            ours = ", ".join(f"{_words(key)} {wanted.get(key)}" for key in differing)
            remedies = [f"{flags[k]}={there[k]}" for k in differing if k in flags and k in there]
            advice = f": use {' '.join(remedies)}" if remedies else ""
            raise CheckpointError(
                f"the checkpoint holds a {_described(there)}, but this run has "
                f"{shortened(ours, SAID)}{shortened(advice, SAID)}"
            )

    def load_model(self, model: nn.Module) -> None:
        """Load parameters and buffers into a plain model of the same architecture.

        Raises:
            CheckpointError: a tensor is missing, is one too many, has another shape, or holds NaN
                or infinity. Nothing is loaded.
        """
        own = model.state_dict()
        for name in sorted(own.keys() - self.model.keys()):
            raise CheckpointError(f"the checkpoint lacks the tensor {quoted(name)} of this model")
        for name, tensor in self.model.items():
            if name not in own:
                raise CheckpointError(
                    f"the checkpoint's tensor {quoted(name)} is not in this model"
                )
            _check(tensor, own[name], quoted(name))
        parameters = dict(model.named_parameters())
        for name, tensor in self.momentum.items():
            if name not in parameters:
                raise CheckpointError(
                    f"the checkpoint's momentum of {quoted(name)} is of no parameter of this model"
                )
            _check(tensor, parameters[name], f"the momentum of {quoted(name)}")
        model.load_state_dict(self.model)

    def load_momentum(self, model: nn.Module, optimizer: Solver) -> None:
        """Hand the momentum to the solver of a model that this has been loaded into."""
        parameters = dict(model.named_parameters())
        optimizer.load_momentum({parameters[name]: t for name, t in self.momentum.items()})


class CheckpointFolder:
    """A folder of checkpoints of one kind of model, in files like ``resnet-epoch-300.pt``.

    Args:
        folder: need not exist before something is written.
        name: of the model, with which the names of the files begin.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._own: Container[int] = ()

    def path(self, epoch: int) -> Path:
        """File of an epoch."""
        return self.folder / f"{self.name}-epoch-{epoch}.pt"

    def epochs(self) -> list[int]:
        """Epochs whose checkpoints are there, in order."""
        pattern = re.compile(rf"{re.escape(self.name)}-epoch-(\d+)\.pt")
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(match[1]) for f in files if (match := pattern.fullmatch(f.name)))

    def prepare(self, epochs: Iterable[int], *, own: Container[int] = ()) -> None:
        """Make the folder, and make sure that checkpoints of these epochs can be written.

        Args:
            epochs: to be written.
            own: epochs that this run may have written before it was resumed; their files are
                written anew.

        Raises:
            CheckpointError: another one is there already, or the folder cannot be written.
        """
        self._own = own
        for epoch in epochs:
            self._refuse_existing(epoch)
            remove_unfinished(self.folder, self.path(epoch).name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise CheckpointError(
                f"the folder {self.folder} for checkpoints cannot be written: {reason_of(error)}"
            ) from error

    def write(self, epoch: int, checkpoint: Checkpoint) -> None:
        """Write an epoch's file: at once and whole, whatever happens meanwhile.

        Raises:
            CheckpointError: the file is there already, or cannot be written.
        """
        self._refuse_existing(epoch)
        content = {"kind": KIND, "version": VERSION, **_fields(checkpoint)}
        file = io.BytesIO()
        try:
            torch.save(content, file)
            write_whole(self.path(epoch), file.getbuffer())
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            raise CheckpointError(
                f"{self.path(epoch)} cannot be written: {reason_of(error)}"
            ) from error

    def read(self, epoch: int) -> Checkpoint:
        """Read an epoch's file, without executing anything that it may ask for.

        Raises:
            CheckpointError: it is missing, damaged, no checkpoint, or of a newer version.
        """
        path = self.path(epoch)
        if not path.is_file():
            there = ", ".join(map(str, self.epochs()))
            choice = f"there are those of {shortened(there)}" if there else "it has none"
            raise CheckpointError(
                f"{self.folder} has no {self.name} checkpoint of epoch {epoch}: {choice}"
            )
        return _checkpoint(_content(path), path)

    def _refuse_existing(self, epoch: int) -> None:
        if epoch not in self._own and self.path(epoch).exists():
            raise CheckpointError(
                f"{self.path(epoch)} exists already and is not overwritten: save into another "
                "folder, or move the file away"
            )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__}


def _content(path: Path) -> Any:
    """Load what a file holds; its checksums are compared, which torch.load does not do."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error
    if start not in (b"PK", b""):
        raise CheckpointError(_foreign(path))
    try:
        with ZipFile(path) as archive:
            whole = archive.testzip() is None
    except (BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} is cut short or damaged: use a checkpoint of another epoch")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except LOADING_ERRORS as error:
        raise CheckpointError(_foreign(path)) from error


def _foreign(path: Path) -> str:
    return f"{path} is no checkpoint of halp: name a folder that this runner saved into"


def _checkpoint(content: Any, path: Path) -> Checkpoint:
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise CheckpointError(_foreign(path))
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(_foreign(path))
    if version > VERSION:
        raise CheckpointError(
            f"{path} is a checkpoint of version {shortened(version)}, and this halp reads those up "
            f"to {VERSION}: use the halp that wrote it, or a newer one"
        )
    parts: dict[str, Any] = {}
    for name in Checkpoint.__dataclass_fields__:
        part, kind = content.get(name), Tensor if name in ("model", "momentum") else Plain
        whole = isinstance(part, dict) and all(
            isinstance(key, str) and isinstance(value, kind) for key, value in part.items()
        )
        if not whole:
            raise CheckpointError(
                f"{path} is incomplete: its {quoted(name)} is missing or not what a "
                "checkpoint holds"
            )
        parts[name] = part
    return Checkpoint(**parts)


def _check(tensor: Tensor, own: Tensor, what: str) -> None:
    """Raise CheckpointError unless the values of ``tensor`` can become those of ``own``."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"the checkpoint's {what} is not stored as an ordinary tensor, as this runner saves it"
        )
    if tensor.shape != own.shape:
        raise CheckpointError(
            f"the checkpoint's {what} has shape {tuple(tensor.shape)}, this model's "
            f"{tuple(own.shape)}"
        )
    if tensor.is_floating_point() != own.is_floating_point():
        raise CheckpointError(
            f"the checkpoint's {what} is {tensor.dtype}, this model's {own.dtype}"
        )
    if not bool(tensor.to(own.dtype).isfinite().all()):
        raise CheckpointError(
            f"the checkpoint's {what} holds NaN or infinity: the run that made it has diverged, so "
            "use a checkpoint of an earlier epoch"
        )


def _described(architecture: Mapping[str, Plain]) -> str:
    parts = [f"{_words(key)} {v}" for key, v in architecture.items() if key != "name"]
    return shortened(f"{architecture.get('name')} ({', '.join(parts)})", SAID)


def _words(key: str) -> str:
    return {"n_classes": "classes", "in_channels": "input channels"}.get(key, key)
