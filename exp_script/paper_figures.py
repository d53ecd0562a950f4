"""What the figures of ``reproduce_paper.py`` look like; matplotlib's object interface only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from paper_runs import Outcome

# Told apart by colour-blind readers too (Okabe and Ito).
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK = (
    "#000000 #E69F00 #56B4E9 #009E73 #0072B2 #D55E00 #CC79A7".split()
)
GREY = "#AAAAAA"

# Of a solver: colour and marker. Its 8 bits are dashed, its 16 bits solid.
SOLVER_STYLES = {
    "SGD": (SKY, ""),
    "LP-SGD": (PINK, "^"),
    "SVRG": (GREY, ""),
    "LP-SVRG": (ORANGE, "s"),
    "HALP": (BLUE, "o"),
}
GRADIENT = "norm of the gradient, ‖∇f‖"


def write_figure(path: Path, draw: Callable[[Any], None], panels: int = 1) -> None:
    """Draw into a new figure and write it as an image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 6.4 * panels, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw_convergence(axes: Any, outcomes: Mapping[str, Outcome]) -> None:
    """‖∇f‖ against cycles, a curve for each label: a solver's title, and a format or nothing."""
    for label, outcome in outcomes.items():
        solver, _, format = label.partition(" ")
        color, marker = SOLVER_STYLES[solver]
        # Full precision lies under what follows it: wide and pale, so that both are seen.
        axes.plot(
            range(len(outcome.norms)),
            outcome.norms,
            label=label if format else f"{label}, full precision",
            color=color,
            linewidth=1.5 if format else 6,
            alpha=1 if format else 0.6,
            linestyle="--" if format.endswith("8") else "-",
            marker=marker,
            markersize=4,
            zorder=2 if format else 1,
        )
    _finish_cycles(axes)


def draw_formats(axes: Any, outcomes: Mapping[tuple[str, bool], Outcome]) -> None:
    """‖∇f‖ against cycles by format: solid with a scale, dashed without."""
    names = list(dict.fromkeys(name for name, _ in outcomes))
    palette = (BLACK, ORANGE, SKY, GREEN, BLUE, RED)
    colors = dict(zip(names, cycle(palette), strict=False))
    for index, ((name, scaled), outcome) in enumerate(outcomes.items()):
        axes.plot(
            range(len(outcome.norms)),
            outcome.norms,
            label=f"{name}, {'scaled' if scaled else 'no scale'}",
            color=colors[name],
            linestyle="-" if scaled else "--",
            linewidth=1.5,
            marker="os^vDP"[names.index(name) % 6],
            markersize=4,
            markevery=(index % 4, 4),
        )
    _finish_cycles(axes, columns=2)


def draw_floor(axes: Any, floors: Mapping[int, float], middle: tuple[float, float]) -> None:
    """LP-SVRG's floors by bits, and a line of slope −1 through ``middle`` (bits, floor)."""
    bits = sorted(floors)
    axes.plot(
        bits, [floors[b] for b in bits], "s", color=ORANGE, markersize=8, label="LP-SVRG's floor"
    )
    axes.plot(
        bits,
        [middle[1] * 2 ** (middle[0] - b) for b in bits],
        "--",
        color=BLACK,
        label="slope −1: a bit more, half the floor",
    )
    axes.set_yscale("log", base=2)
    axes.set_xticks(bits)
    _finish(axes, "bits of the fixed-point format", GRADIENT, log=False)


def draw_mu(axes: Any, progress: Mapping[float, float], true: float) -> None:
    """Last ‖∇f‖ over the first against μ, with the true μ and what is claimed of the minimum."""
    mus = sorted(progress)
    axes.plot(mus, [progress[mu] for mu in mus], "o-", color=BLUE, label="HALP fixed8")
    axes.axvline(true, color=BLACK, linestyle=":", label=f"true μ = {true:g}")
    axes.axvspan(3 * true, 10 * true, color=GREEN, alpha=0.2, label="3 to 10 times the true μ")
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_xscale("log")
    _finish(axes, "HALP's μ: small is range, large is precision", "last ‖∇f‖ / first ‖∇f‖")


def draw_grid(
    figure: Any,
    axes: Any,
    progress: Mapping[tuple[int, int], float],
    needed: Mapping[int, float],
) -> None:
    """Coloured squares, by κ and bits: how ‖∇f‖ changed; a staircase of the bits needed."""
    conditions = sorted({condition for condition, _ in progress})
    points = [(conditions.index(c), b, math.log10(p)) for (c, b), p in progress.items()]
    x, y, change = zip(*points, strict=True)
    squares = axes.scatter(
        x, y, c=change, marker="s", s=420, cmap="RdBu_r", vmin=-3, vmax=3, edgecolors=GREY
    )
    bar = figure.colorbar(squares, ax=axes, extend="both")
    bar.set_label("log10 of last ‖∇f‖ / first: blue contracts, red diverges")
    axes.step(
        range(len(conditions)),
        [needed[c] - 0.5 for c in conditions],
        where="mid",
        color=BLACK,
        linewidth=2,
        label="contracts from here on",
    )
    axes.set_xticks(range(len(conditions)), [str(c) for c in conditions])
    axes.set_yticks(sorted(set(y)))
    axes.margins(x=0.2, y=0.15)
    axes.set_xlabel("condition number κ")
    axes.set_ylabel("bits of the fixed-point format")
    axes.legend(loc="upper left")


def _finish_cycles(axes: Any, columns: int = 1) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    _finish(axes, "cycles of T steps", GRADIENT, columns)


def _finish(axes: Any, x: str, y: str, columns: int = 1, log: bool = True) -> None:
    if log:
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(loc="best", frameon=True, framealpha=0.85, fontsize="small", ncols=columns)
