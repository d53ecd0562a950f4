"""Evaluating a closure at another point without leaving a trace."""

import importlib
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef


class RandomState:
    """The state of every random generator that a closure or a loader may draw from.

    PyTorch's (CPU, and each CUDA device in use), Python's, NumPy's, and generators given.
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        numpy_random = sys.modules.get("numpy.random")
        self._numpy = numpy_random.get_state() if numpy_random else None
        self._generators = [(g, g.get_state()) for g in generators]

    def restore(self) -> None:
        """Set every generator back."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            importlib.import_module("numpy.random").set_state(self._numpy)
        for generator, state in self._generators:
            generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """Return it as tensors and plain values, which ``torch.load(weights_only=True)`` reads."""
        numpy = None
        if self._numpy is not None:
            name, words, *rest = self._numpy
            numpy = [name, torch.tensor(words.tolist()), *rest]
        return {
            "torch": self._torch,
            "cuda": self._cuda,
            "python": self._python,
            "numpy": numpy,
            "generators": [state for _, state in self._generators],
        }

    @classmethod
    def from_state_dict(
        cls, state: dict[str, Any], generators: Iterable[torch.Generator] = ()
    ) -> "RandomState":
        """Return the state that ``state`` holds, of these generators in the same order.

        Raises:
            ValueError: there are more or fewer generators than there were.
        """
        self = cls(())
        self._torch, self._cuda, self._python = state["torch"], state["cuda"], state["python"]
        if state["numpy"] is not None:
            name, words, *rest = state["numpy"]
            self._numpy = (name, words.numpy(), *rest)
        generators = list(generators)
        if len(generators) != len(state["generators"]):
            raise ValueError(
                f"there are random states of {len(state['generators'])} generators of a loader, "
                f"but this one has {len(generators)}: give it its own generator, or shuffle it, "
                "only if it had been so before"
            )
        self._generators = list(zip(generators, state["generators"], strict=True))
        return self


class BufferState:
    """What buffers hold: those of a model, or tensors.

    Of a model also which tensors are its buffers: a module may assign a new one at every call.
    """

    def __init__(self, buffers: nn.Module | Iterable[Tensor]) -> None:
        self._held: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        if isinstance(buffers, nn.Module):
            self._held = [(m._buffers, dict(m._buffers)) for m in buffers.modules()]
            buffers = buffers.buffers()
        self._copies = [(buffer, buffer.detach().clone()) for buffer in buffers]

    def restore(self) -> None:
        """Make everything as it was."""
        for held, before in self._held:
            held.clear()
            held.update(before)
        with torch.no_grad():
            for buffer, copy in self._copies:
                buffer.copy_(copy)


@contextmanager
def preserved(
    buffers: nn.Module | Iterable[Tensor], generators: Iterable[torch.Generator] = ()
) -> Iterator[None]:
    """Within the block, random state and buffers may change; afterwards they are as before."""
    random_state, buffer_state = RandomState(generators), BufferState(buffers)
    try:
        yield
    finally:
        random_state.restore()
        buffer_state.restore()


class Buffers:
    """What a solver was told are the model's buffers: the model, or tensors.

    Tensors are not held on to, which shows where the model has others by now.
    """

    def __init__(self, buffers: nn.Module | Iterable[Tensor]) -> None:
        self._model = buffers if isinstance(buffers, nn.Module) else None
        tensors = [] if isinstance(buffers, nn.Module) else list(buffers)
        self._tensors = [(TensorWeakRef(t), tuple(t.shape)) for t in tensors]

    def now(self) -> nn.Module | list[Tensor]:
        """Return the model, or the tensors.

        Raises:
            RuntimeError: one of them is gone.
        """
        if self._model is not None:
            return self._model
        tensors = []
        for ref, shape in self._tensors:
            tensor = ref()
            if tensor is None:
                raise RuntimeError(
                    f"a tensor of shape {shape} that was given in buffers= is no buffer of the "
                    "model any more: model.to(...) or an assignment has replaced it; pass the "
                    "model itself, buffers=model, or set optimizer.buffers = model.buffers() after "
                    "that"
                )
            tensors.append(tensor)
        return tensors

    def __reduce__(self) -> tuple[type["Buffers"], tuple[Any]]:
        return Buffers, (self.now(),)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that iterating ``loader`` draws from, other than the global ones."""
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders.append(getattr(holders[-1], "sampler", None))
    found = {
        id(g): g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)
    }
    return list(found.values())
