"""What a snapshot asks of a loader, and of the batches it yields."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler


def check_visits_each_sample_once(loader: Any) -> None:
    """Raise ValueError for a loader whose full gradient would not be that of the data set.

    Or whose iteration would silently end the one that is in progress.
    """
    if isinstance(loader, Iterator):
        raise ValueError(
            "snapshot() got an iterator, which would be used up by one pass; pass the DataLoader "
            "(or a list of batches) itself"
        )
    if not isinstance(loader, DataLoader):
        return
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False):
        raise ValueError(
            f"snapshot() needs a loader that visits each sample once, but its "
            f"{type(sampler).__name__} draws with replacement; pass a second DataLoader over the "
            "same data without it"
        )
    if isinstance(sampler, RandomSampler) and sampler.num_samples != len(sampler.data_source):
        raise ValueError(
            "snapshot() needs a loader that visits each sample once, but its RandomSampler draws "
            f"{sampler.num_samples} of {len(sampler.data_source)} samples; pass a second "
            "DataLoader without num_samples"
        )
    if isinstance(loader.dataset, IterableDataset) and loader.drop_last:
        raise ValueError(
            "snapshot() needs a loader that visits each sample once, but drop_last=True may drop "
            "the end of its stream; pass a second DataLoader with drop_last=False"
        )
    if _drops_samples(loader, sampler):
        raise ValueError(
            f"snapshot() needs a loader that visits each sample once, but drop_last=True drops the "
            f"last {len(sampler) % loader.batch_sampler.batch_size} of {len(sampler)}; pass a "  # type: ignore[arg-type, union-attr]
            "second DataLoader with drop_last=False"
        )
    if _is_in_the_middle(loader):
        raise ValueError(
            "snapshot() got a DataLoader with persistent_workers=True in the middle of an "
            "iteration, which a second iteration would end; pass a second DataLoader, or set "
            "persistent_workers=False"
        )


def _drops_samples(loader: DataLoader, sampler: Any) -> bool:
    batches = loader.batch_sampler
    if (
        isinstance(loader.dataset, IterableDataset)
        or batches is None
        or not getattr(batches, "drop_last", False)
    ):
        return False
    return len(sampler) % batches.batch_size != 0  # type: ignore[attr-defined]


def _is_in_the_middle(loader: DataLoader) -> bool:
    iterator = getattr(loader, "_iterator", None)  # kept only with persistent workers
    if iterator is None:
        return False
    if isinstance(loader.dataset, IterableDataset):  # its end shows in the workers having stopped
        return any(iterator._workers_status)
    return iterator._num_yielded < len(loader)


def run_on_batch(closure: Callable[..., Any], batch: Any) -> Any:
    """Call the closure with a batch: unpacked if it is a tuple, a list or a mapping."""
    if isinstance(batch, tuple | list):
        return closure(*batch)
    if isinstance(batch, Mapping):
        return closure(**batch)
    return closure(batch)


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return (
        [t for part in batch for t in tensors_in(part)] if isinstance(batch, tuple | list) else []
    )


def check_finite(batch: Any, index: int) -> None:
    """Raise ValueError if a floating-point tensor of the batch holds NaN or infinity."""
    for position, t in enumerate(tensors_in(batch)):
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise ValueError(
                f"batch {index} of the loader (counting from 0) holds NaN or infinity in its "
                f"tensor {position}; clean the data first"
            )


def length_of(batch: Any) -> int:
    """Return how many samples a batch holds: the length of its first tensor.

    Raises:
        ValueError: there is no tensor with a length.
    """
    tensors = tensors_in(batch)
    if not tensors or tensors[0].dim() == 0:
        raise ValueError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} holds; pass "
            "snapshot(..., weight=lambda batch: number_of_samples)"
        )
    return len(tensors[0])


def check_weight(weight: float, index: int) -> float:
    """Return a batch's weight as a float, or raise ValueError unless it is 0 or positive."""
    weight = float(weight)
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(
            f"the weight of batch {index} must be 0 or a positive number, not {weight}"
        )
    return weight
