"""The training loop, the same for every solver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn

from halp.data import Batches, units
from halp.optim.base import Solver
from halp.training.checkpointer import Checkpointer
from halp.training.metrics import Criterion, Measures
from halp.training.records import EpochRecord


def train(
    model: nn.Module,
    optimizer: Solver,
    batches: Batches,
    criterion: Criterion,
    *,
    epochs: int,
    measure: Callable[[], Measures],
    measure_every: int = 1,
    after_step: Callable[[], object] | None = None,
    after_epoch: Callable[[int], object] | None = None,
    checkpointer: Checkpointer | None = None,
) -> Iterator[EpochRecord]:
    """Train, yielding what was measured before training and after epochs.

    Args:
        model: the model that ``optimizer`` trains.
        optimizer: any solver of `halp.optim`.
        batches: training data; one iteration over it is an epoch.
        criterion: mean loss of outputs and labels, over the labels that count.
        epochs: number of epochs, possibly 0.
        measure: measures the model as it is now; its time is not counted.
        measure_every: a record is made of every so many epochs, and always of epoch 0 (before
            training) and of the last.
        after_step: called after each inner step, for a progress bar.
        after_epoch: called with the number of each epoch once it is over and before it is measured,
            for checkpoints and learning rates.
        checkpointer: of this model, optimizer and batches; makes checkpoints, and what it has
            restored is gone on from, without a record of epoch 0.

    Yields:
        One record for each measured epoch; training goes on when the next one is asked for.
        ``seconds`` is the training time of that one epoch, snapshots included.

    Raises:
        Stopped: ``checkpointer.stop()`` was called.
    """
    checkpointer = checkpointer or Checkpointer(None, model, optimizer, batches)

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        return loss

    if not checkpointer.resumed:
        yield EpochRecord.of(epoch=0, measures=measure(), seconds=0.0)
    for epoch in checkpointer.epochs(epochs):
        model.train()
        for inputs, labels in checkpointer.batches():
            if optimizer.snapshot_due:
                optimizer.snapshot(batches, loss_of, weight=lambda batch: units(batch[1]))
            optimizer.step(partial(loss_of, inputs, labels))
            if after_step is not None:
                after_step()
        done = epoch + 1
        if after_epoch is not None:
            after_epoch(done)
        if done % measure_every == 0 or done == epochs:
            yield EpochRecord.of(epoch=done, measures=measure(), seconds=checkpointer.seconds)
