"""Comparing state dicts, and those of a run's checkpoints, bit for bit."""

import io
from pathlib import Path

import torch
from torch import Tensor

from halp.training.durable import read_sealed


def assert_same(left, right, where: str = "state") -> None:
    """Fail, naming the place, unless two nested states hold the same bits."""
    assert type(left) is type(right), where
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape, where
        assert left.numpy().tobytes() == right.numpy().tobytes(), (
            f"{where} differs by up to {(left - right).abs().max()}"
        )
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert left == right or (left != left and right != right), f"{where}: {left} is not {right}"


def files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, in order."""
    return sorted(folder.glob("step-*.pt"))


def newest(folder: Path) -> dict:
    """What the newest checkpoint in a folder holds, but for times."""
    state = torch.load(io.BytesIO(read_sealed(files(folder)[-1])), weights_only=True)
    del state["seconds"]
    for record in state["parts"].get("records", {}).get("records", ()):
        del record["seconds"]
    return state
