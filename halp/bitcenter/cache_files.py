"""Where a cache lies: in the host's memory, or in a memory-mapped file."""

import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

_ON_SITE = (
    'halp.bit_center(..., offsets="on-site") (--on-site-compute) computes offsets where they are '
    "needed and keeps nothing"
)


class NoRoomError(MemoryError):
    """Cached offsets that do not fit; the message names the sizes and the way out."""


class HostMemory:
    """Keeps every batch in memory of its own, pinned where a GPU reads it."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __str__(self) -> str:
        return "in memory"

    def check_room(self, nbytes: int) -> None:
        """Raise `NoRoomError` unless so many more bytes are free."""
        free = available_memory()
        if free is not None and nbytes > free:
            _refuse(nbytes, f"{in_words(free)} of memory are free")

    def allocate(self, nbytes: int, *, pinned: bool) -> Tensor:
        """Return memory for one batch."""
        if nbytes > 2**24:
            self.check_room(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def keep(self, memory: Tensor) -> Any:
        """Keep what was allocated; return what finds it again."""
        self.nbytes += memory.nbytes
        return memory

    def finish(self) -> None:
        """Say that everything is there."""

    def load(self, kept: Any, device: torch.device) -> Tensor:
        """Return one batch on a device."""
        return kept.to(device, non_blocking=True)


class MappedFile:
    """Keeps all batches in one nameless file, which is gone with the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nbytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, prefix="halp-offsets-")
        except OSError as error:
            raise NoRoomError(
                f"the folder {folder} for cached offsets cannot be written: {error.strerror}; "
                "name another folder"
            ) from error
        self._map: Tensor | None = None

    def __str__(self) -> str:
        return f"in a file in {self.folder}"

    def check_room(self, nbytes: int) -> None:
        """Raise `NoRoomError` unless so many more bytes are free."""
        free = shutil.disk_usage(self.folder).free
        if nbytes > free:
            _refuse(nbytes, f"{in_words(free)} are free in {self.folder}")

    def allocate(self, nbytes: int, *, pinned: bool) -> Tensor:
        """Return memory for one batch."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def keep(self, memory: Tensor) -> Any:
        """Write what was allocated; return what finds it again."""
        start = self.nbytes
        self.nbytes += memory.nbytes + -memory.nbytes % mmap.ALLOCATIONGRANULARITY
        try:
            self._file.seek(start)
            self._file.write(memory.numpy().data)
        except OSError as error:
            _refuse(self.nbytes, f"{self.folder} cannot hold them ({error.strerror})")
        return start, memory.nbytes

    def finish(self) -> None:
        """Map the file."""
        self._file.flush()
        self._file.truncate(self.nbytes)
        if self.nbytes:
            mapped = mmap.mmap(self._file.fileno(), self.nbytes, access=mmap.ACCESS_COPY)
            self._map = torch.frombuffer(mapped, dtype=torch.uint8)

    def load(self, kept: Any, device: torch.device) -> Tensor:
        """Return one batch on a device."""
        start, nbytes = kept
        assert self._map is not None
        return self._map[start : start + nbytes].to(device)


def _refuse(nbytes: int, what_there_is: str) -> NoReturn:
    raise NoRoomError(
        f"cached offsets need about {in_words(nbytes)}, but {what_there_is}. {_ON_SITE}"
    )


def available_memory() -> int | None:
    """Return how many bytes the process can still allocate, as far as the system tells."""
    free = None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _least(free, _left_to_container())


def _left_to_container() -> int | None:
    """Return what a container's limit leaves (Linux control groups, version 2)."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(int(limit) - used, 0) if limit.isdigit() else None


def _least(*numbers: int | None) -> int | None:
    known = [number for number in numbers if number is not None]
    return min(known) if known else None


def in_words(nbytes: float) -> str:
    """Return a number of bytes as people write it."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
