"""Compare cached offsets with those computed on site: time a step, time a snapshot, and host bytes.

The models have the size of the experiments'. Every round times both ways one after the other, so
that what else the machine does hits them alike; a ratio is the median over rounds. Under each model
stand the bytes a sample that the cache keeps, by operation.

    python benchmarks/offsets.py [--models logreg lenet …] [--threads=2] [--rounds=10]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from step import LEARNING, PROBLEMS, Problem
from torch import Tensor
from torch.nn.functional import cross_entropy

import halp
from halp.bitcenter.cache import OffsetCache

STEPS = {"logreg": 50, "lenet": 3, "lstm": 1, "resnet": 1}
BATCHES = 2


class Trained(NamedTuple):
    """Two things to time, and the cache if there is one."""

    step: Callable[[], None]
    snapshot: Callable[[], None]
    cache: OffsetCache | None


def train(problem: Problem, offsets: str) -> Trained:
    """Make a bit-centered model of the problem and its solver, with a first snapshot."""
    torch.manual_seed(0)
    model = halp.bit_center(problem.build(), "fp16", offsets=offsets)
    optimizer = halp.optim.BitCenterSVRG(
        model.parameters(), T=10**9, buffers=model.buffers(), **LEARNING
    )
    x, y = problem.batch()
    batches = [(x.roll(i, 0), y.roll(i, 0)) for i in range(BATCHES)]

    def closure(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    def snapshot() -> None:
        optimizer.snapshot(batches, closure)

    snapshot()
    cache = next(iter(model.parameters())).context.cache  # type: ignore[attr-defined]
    return Trained(lambda: optimizer.step(lambda: closure(*batches[0])), snapshot, cache)


def seconds(run: Callable[[], None], times: int) -> float:
    """Return the time that one of several runs takes."""
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def main() -> None:
    """Print a table, and bytes by operation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"fp16, near, {args.threads} threads; cached against on-site")
    print(
        f"{'model':<8}{'step, on-site':>15}{'cached':>12}{'ratio':>7}"
        f"{'snapshot ratio':>16}{'bytes a sample':>16}"
    )
    bytes_by_op = {}
    for name in args.models:
        problem = PROBLEMS[name]
        ways = {offsets: train(problem, offsets) for offsets in ("on-site", "cached")}
        steps: dict[str, list[float]] = {offsets: [] for offsets in ways}
        snapshots: dict[str, list[float]] = {offsets: [] for offsets in ways}
        for round_ in range(args.rounds + 1):
            for offsets, way in ways.items():
                step = seconds(way.step, STEPS[name])
                snapshot = seconds(way.snapshot, 1)
                if round_:  # the first round warms up
                    steps[offsets].append(step)
                    snapshots[offsets].append(snapshot)
        cache = ways["cached"].cache
        assert cache is not None
        units = BATCHES * problem.labels[0] * (1 if len(problem.labels) == 1 else problem.labels[1])
        bytes_by_op[name] = {op: n / units for op, n in cache.bytes_by_op.items()}
        print(
            f"{name:<8}{1e3 * statistics.median(steps['on-site']):>12.2f} ms"
            f"{1e3 * statistics.median(steps['cached']):>9.2f} ms"
            f"{ratio(steps):>7.2f}{ratio(snapshots):>16.2f}{cache.nbytes / units:>16.0f}"
        )
    for name, by_op in bytes_by_op.items():
        print(f"\n{name}, bytes a sample by operation (of the LSTM: a word)")
        for op, nbytes in by_op.items():
            print(f"  {op or 'loss':<36}{nbytes:>10.1f}")


def ratio(times: dict[str, list[float]]) -> float:
    """Return the median of cached over on-site."""
    pairs = zip(times["cached"], times["on-site"], strict=True)
    return statistics.median(cached / on_site for cached, on_site in pairs)


if __name__ == "__main__":
    main()
