#!/usr/bin/env python3
"""Repeat the claims of "High-Accuracy Low-Precision Training" (arXiv 1803.03383) on a laptop.

Prints and writes a table that says for each claim what was measured and whether it holds, and
draws a figure for each experiment. The same command gives the same numbers. The exit code is 0 if
every claim holds, 1 if one does not, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

from flags import Parser, UsageError, refuse_existing
from halp.data import DataError
from halp.messages import WHOLE, quoted, shortened
from paper_claims import Claim
from paper_experiments import EXPERIMENTS, Experiment
from paper_figures import write_figure
from paper_problems import has_mnist
from paper_runs import Outcome, Run, carry_out_all
from tables import REPOSITORY

PROCESSES = 2

TABLE, NUMBERS = "table.md", "results.json"
TITLE = "# Claims of arXiv 1803.03383, measured"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    started = time.perf_counter()
    try:
        args = _parse(argv)
        claims = reproduce(_experiments(args), Path(args.output))
    except BrokenProcessPool:
        return _fail("a process that did runs was ended from outside, perhaps for lack of memory")
    except (UsageError, DataError, OSError) as mistake:
        return _fail(str(mistake))
    except KeyboardInterrupt:
        print("reproduce_paper.py: interrupted; nothing was written", file=sys.stderr)
        return 130
    failed = [claim for each in claims.values() for claim in each if not claim.holds]
    print(f"{time.perf_counter() - started:.0f} s; table, numbers and figures: {args.output}")
    if failed:
        print(f"{len(failed)} of these claims did not hold", file=sys.stderr)
    return 1 if failed else 0


def reproduce(experiments: Mapping[str, Experiment], output: Path) -> dict[str, list[Claim]]:
    """Carry out experiments, report on them, and write table.md, results.json and figures.

    Raises:
        UsageError: one of these files is there, and not from an earlier time.
        DataError: MNIST cannot be read.
        OSError: ``output`` cannot be written to.
    """
    output.mkdir(parents=True, exist_ok=True)
    figures = {letter: output / f"{letter}_{e.file_name}.png" for letter, e in experiments.items()}
    _refuse_others(output / TABLE, output / NUMBERS, *figures.values())
    runs = {letter: experiment.runs() for letter, experiment in experiments.items()}
    done = _carry_out([run for each in runs.values() for run in each.values()])
    outcomes = {
        letter: {key: done[run] for key, run in each.items()} for letter, each in runs.items()
    }
    claims = {letter: experiments[letter].claims(each) for letter, each in outcomes.items()}
    table = _table(experiments, claims)
    print(f"\n{table}")
    (output / TABLE).write_text(table, encoding="utf-8")
    _write_numbers(output / NUMBERS, outcomes)
    for letter, experiment in experiments.items():
        draw = partial(experiment.draw, outcomes=outcomes[letter])
        write_figure(figures[letter], draw, experiment.panels)
    return claims


def _refuse_others(table: Path, *files: Path) -> None:
    """Raise UsageError unless what would be overwritten is this script's own, by its table."""
    begins = f"{TITLE}\n".encode()
    if not (table.is_file() and table.read_bytes().startswith(begins)):
        for file in (table, *files):
            refuse_existing(file, "name another folder with --output")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="reproduce_paper.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="experiments:\n" + "\n".join(f"  {k}  {e.title}" for k, e in EXPERIMENTS.items()),
    )
    parser.add_argument("--quick", action="store_true", help="fewer, shorter runs; no MNIST")
    parser.add_argument(
        "--only", nargs="+", metavar="EXPERIMENT", choices=EXPERIMENTS, help="a b … (default: all)"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        default=str(REPOSITORY / "outputs" / "paper"),
        help="where table and figures go, over those of an earlier time (default: outputs/paper)",
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        default=os.environ.get("HALP_DATA") or str(REPOSITORY / "datasets"),
        help="where MNIST lies (default: $HALP_DATA, else datasets/); it is not downloaded",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, help="of data, samples and rounding (default: 0)"
    )
    return parser.parse_args(argv)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 2**31):
        raise argparse.ArgumentTypeError(
            f"it must be a whole number in 0 ... {2**31 - 1}, not {quoted(text)}"
        )
    return int(text)


def _experiments(args: argparse.Namespace) -> dict[str, Experiment]:
    letters = args.only or list(EXPERIMENTS)
    data_dir = args.data_dir
    if "e" in letters and args.quick:
        print("MNIST is left out of --quick")
    elif "e" in letters and not has_mnist(data_dir):
        print(
            f"MNIST is left out: its files are not in {data_dir}; name the folder that has them "
            "with --data-dir or $HALP_DATA, or let run_models.py --dataset=mnist download them"
        )
        data_dir = None
    return {
        letter: experiment(args.quick, args.seed, data_dir)
        for letter, experiment in EXPERIMENTS.items()
        if letter in letters
    }


def _carry_out(runs: Sequence[Run]) -> dict[Run, Outcome]:
    """Carry out runs, with a line of progress for each."""
    total, ended = len(set(runs)), 0
    print(f"{total} runs in {PROCESSES} processes", flush=True)

    def report(run: Run, outcome: Outcome) -> None:
        nonlocal ended
        ended += 1
        print(
            f"[{ended:{len(str(total))}d}/{total}] {run.description}: gradient norm "
            f"{outcome.norms[0]:.1e} -> {outcome.norms[-1]:.1e} in {outcome.seconds:.1f} s",
            flush=True,
        )

    return carry_out_all(runs, PROCESSES, report)


def _table(experiments: Mapping[str, Experiment], claims: Mapping[str, Sequence[Claim]]) -> str:
    """The claims as Markdown that is also legible as it stands."""
    lines = [TITLE, ""]
    for letter, each in claims.items():
        lines += [f"## ({letter}) {experiments[letter].title}", ""]
        for claim in each:
            lines += [
                f"* {claim.claim}:",
                f"  **{'holds' if claim.holds else 'DOES NOT HOLD'}**: {claim.measured}.",
            ]
        lines.append("")
    return "\n".join(lines)


def _write_numbers(path: Path, outcomes: Mapping[str, Mapping[object, Outcome]]) -> None:
    """‖∇f‖ and f after each cycle of each run; of what overflowed, null."""
    numbers = {
        letter: {
            _key(key): {"gradient_norm": _finite(o.norms), "loss": _finite(o.losses)}
            for key, o in each.items()
        }
        for letter, each in outcomes.items()
    }
    path.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _key(key: object) -> str:
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _finite(values: Sequence[float]) -> list[float | None]:
    return [v if abs(v) < float("inf") else None for v in values]


def _fail(sentence: str) -> int:
    print(f"reproduce_paper.py: error: {shortened(sentence, WHOLE)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
