"""Figures of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from halp.messages import quoted
from halp.training.records import EpochRecord

QUANTITIES = {
    "train_loss": "training loss",
    "grad_norm": "norm of the training loss's gradient",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
}


class _Style(NamedTuple):
    color: str  # told apart by colour-blind readers too (Okabe and Ito)
    dashes: str
    marker: str
    width: float


# Curves that coincide stay visible: wide pale ones first, then narrow dashed ones on top.
_STYLES = (
    _Style("#BBBBBB", "-", "", 5.0),
    _Style("#CC79A7", "--", "v", 1.5),
    _Style("#56B4E9", "-", "", 5.0),
    _Style("#E69F00", "-", "s", 1.5),
    _Style("#000000", "--", "o", 1.5),
    _Style("#009E73", "-.", "D", 1.5),
)
_MARKERS_PER_CURVE = 12


def plot_convergence(
    runs: Mapping[str, Sequence[EpochRecord]],
    path: Path,
    *,
    quantity: str = "grad_norm",
    title: str = "",
) -> None:
    """Draw one quantity against epochs, on a log scale, one curve a run, into an image file.

    Args:
        runs: label of each curve, and its records. Values that are not positive and finite have
            no place on a log scale and are left out.
        path: image file to write; its suffix decides the format. Parent folders are created.
        quantity: a field of `EpochRecord`.
        title: over the figure.

    Raises:
        ValueError: ``quantity`` is not one that can be drawn.
    """
    if quantity not in QUANTITIES:
        raise ValueError(
            f"{quoted(quantity)} cannot be drawn: choose one of {', '.join(QUANTITIES)}"
        )
    # The object interface: no pyplot, hence no global state, no display and nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (label, records), style in zip(runs.items(), cycle(_STYLES), strict=False):
        values = [getattr(record, quantity) for record in records]
        drawn = [v if math.isfinite(v) and v > 0 else math.nan for v in values]
        axes.plot(
            [record.epoch for record in records],
            drawn,
            label=label,
            color=style.color,
            linestyle=style.dashes,
            linewidth=style.width,
            marker=style.marker,
            markersize=5,
            markevery=max(1, len(records) // _MARKERS_PER_CURVE),
        )
    axes.set_yscale("log")
    axes.set_xlabel("epochs")
    axes.set_ylabel(QUANTITIES[quantity])
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(loc="best", frameon=False)
    axes.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
