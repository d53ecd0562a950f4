"""One solver on one problem, and many of them in parallel, for ``reproduce_paper.py``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import halp
from halp.data import Batches
from halp.optim.base import Solver
from halp.training import measure_training
from paper_problems import Problem
from tables import SOLVERS

DIVERGED = 1e3
"""A run is over once ‖∇f‖ has grown this many times."""

ROWS_AT_ONCE = 10_000
"""Of the data, where all of it is read."""


RANGE = 16
"""What the fixed-point formats of LP-SGD and LP-SVRG reach from −RANGE to: data and gradients."""

MU = 0.3
"""HALP's μ on least squares, where the true one is 0.1: see experiment d."""


@dataclass(frozen=True)
class Run:
    """One solver on one problem."""

    problem: Problem
    solver: str  # a name of ``--solver``
    cycles: int  # of T steps each
    format: str | None = None  # None in full precision
    scale: float | str | None = None  # of what is rounded, "auto" or None: none
    mu: float | None = None  # fixed-point HALP only
    rounding: str = "stoc"

    @property
    def label(self) -> str:
        """Its solver and its format."""
        title = SOLVERS[self.solver].title
        return title if self.format is None else f"{title} {self.format}"

    @property
    def description(self) -> str:
        """For a line of progress."""
        details = [] if self.mu is None else [f"μ {self.mu:g}"]
        if self.format is not None and self.scale is None:
            details.append("no scale")
        if self.format is not None and self.rounding != "stoc":
            details.append(self.rounding)
        return ", ".join([self.label, *details, str(self.problem)])


@dataclass(frozen=True)
class Outcome:
    """What a run measured, before it began and after each cycle, in full precision."""

    norms: tuple[float, ...]  # ‖∇f‖
    losses: tuple[float, ...]  # f
    seconds: float

    @property
    def final(self) -> float:
        """Last ‖∇f‖; infinite for a run that overflowed."""
        return self.norms[-1] if math.isfinite(self.norms[-1]) else math.inf

    @property
    def progress(self) -> float:
        """Last ‖∇f‖ over the first."""
        return self.final / self.norms[0]

    def floor(self) -> float:
        """Root mean square of ‖∇f‖ over the second half of the cycles."""
        tail = numpy.array(self.norms[1 + (len(self.norms) - 1) // 2 :])
        return float(numpy.sqrt((tail**2).mean()))


def low_precision(problem: Problem, solver: str, cycles: int, bits: int) -> Run:
    """LP-SGD or LP-SVRG in fixed point from −RANGE to RANGE."""
    return Run(problem, solver, cycles, f"fixed{bits}", scale=RANGE * 2.0 ** (1 - bits))


def halp_fixed(
    problem: Problem, cycles: int, bits: int, mu: float = MU, rounding: str = "stoc"
) -> Run:
    """HALP in fixed point."""
    return Run(problem, "bc-svrg", cycles, f"fixed{bits}", "auto", mu, rounding)


def carry_out(run: Run) -> Outcome:
    """Do a run from w = 0. The same run gives the same bits."""
    problem, started = run.problem, time.perf_counter()
    inputs, targets = problem.data
    model = problem.model()
    optimizer = _solver(run, model)
    whole = Batches(inputs, targets, ROWS_AT_ONCE)
    measured = [_measure(run, model, whole)]

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(model(inputs), targets)
        loss.backward()
        return loss

    orders = numpy.random.default_rng([problem.seed, 1])
    for _ in range(run.cycles):
        if optimizer.snapshot_due:
            optimizer.snapshot(whole, loss_of)
        order = orders.integers(len(inputs), size=(problem.steps, problem.batch_size))
        for rows in torch.from_numpy(order):
            optimizer.step(partial(loss_of, inputs[rows], targets[rows]))
        measured.append(_measure(run, model, whole))
        if not measured[-1][1] < DIVERGED * measured[0][1]:
            break
    losses, norms = zip(*measured, strict=True)
    return Outcome(norms, losses, time.perf_counter() - started)


def carry_out_all(
    runs: Sequence[Run], processes: int, report: Callable[[Run, Outcome], object]
) -> dict[Run, Outcome]:
    """Do runs side by side, each in a process with one thread; the longest are begun first.

    Args:
        runs: equal ones are done once.
        processes: how many at a time.
        report: is told of each run as it ends, in no particular order.
    """
    queue = sorted(dict.fromkeys(runs), key=_expected_cost, reverse=True)
    outcomes: dict[Run, Outcome] = {}
    with ProcessPoolExecutor(
        min(processes, len(queue)), get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        futures = {pool.submit(carry_out, run): run for run in queue}
        try:
            for future in as_completed(futures):
                run = futures[future]
                outcomes[run] = future.result()
                report(run, outcomes[run])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return outcomes


def _solver(run: Run, model: nn.Module) -> Solver:
    """Make the solver; the model is brought into the form that it trains."""
    entry, problem = SOLVERS[run.solver], run.problem
    options: dict[str, Any] = {
        "lr": problem.lr,
        "momentum": problem.momentum,
        "weight_decay": problem.weight_decay,
    }
    precision = {
        "format": run.format,
        "rounding": run.rounding,
        "scale": run.scale,
        "seed": problem.seed,
    }
    if entry.bit_centered:
        halp.bit_center(model, **precision, offset_dtype=problem.dtype)  # type: ignore[arg-type]
        if run.mu is not None:
            options["mu"] = run.mu
    else:
        model.to(problem.dtype)
        if entry.rounds:
            options |= precision
    if entry.outer_loop:
        options["T"] = problem.steps
    solver: Solver = entry.optimizer(model.parameters(), **options)
    return solver


def _measure(run: Run, model: nn.Module, whole: Batches) -> tuple[float, float]:
    problem = run.problem
    return measure_training(
        model, whole, problem.loss, weight_decay=problem.weight_decay, dtype=problem.dtype
    )


def _expected_cost(run: Run) -> float:
    """Roughly in proportion to a run's time."""
    entry, problem = SOLVERS[run.solver], run.problem
    step = 1 + 9 * entry.rounds + 9 * (entry.rounds and not entry.bit_centered)
    size = 1 + problem.batch_size * problem.features / 20_000
    return run.cycles * problem.steps * step * size
