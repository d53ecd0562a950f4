#!/usr/bin/env python3
"""Run several solvers on one problem, print a table and draw their convergence.

Any flag of ``run_models.py`` but ``--solver`` can be given; those not given are DEFAULTS.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flags import HelpFormatter, Parser, UsageError, refuse_existing
from halp.messages import WHOLE, shortened
from halp.training import Diverged, EpochRecord, plot_convergence
from interrupts import Interrupted
from run_models import MISTAKES, run
from settings import Settings, parse
from tables import REPOSITORY, SOLVERS

DEFAULTS = (
    "--dataset=digits",
    "--model=logreg",
    "--alpha=0.4",
    "--reg=0.01",
    "--batch-size=8",
    "--n-epochs=40",
    "--offset-dtype=float64",
)
"""A strongly convex problem on which low-precision SVRG stalls a thousandth from the optimum."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    try:
        args, flags = _parser().parse_known_args(argv)
        figure = Path(args.figure or Path(args.output) / "convergence.png")
        refuse_existing(figure, "name another one with --figure")
        runs = compare(_settings(args.solvers, args.output, flags))
        plot_convergence(_labelled(runs), figure, title=_title(next(iter(runs))))
    except MISTAKES as mistake:
        print(f"compare_runs.py: error: {shortened(mistake, WHOLE)}", file=sys.stderr)
        return 2
    except Diverged as end:
        print(f"compare_runs.py: a run has diverged: {end}", file=sys.stderr)
        return 1
    except Interrupted as stop:
        print(f"compare_runs.py: {stop}", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("compare_runs.py: interrupted; what was measured so far is kept", file=sys.stderr)
        return 130
    print(f"\n{_table(runs)}\n\nfigure: {figure}\nmetrics: {args.output}")
    return 0


def compare(settings: Sequence[Settings]) -> dict[Settings, list[EpochRecord]]:
    """Carry out the runs one after the other."""
    runs = {}
    for each in settings:
        runs[each] = run(each, announce=lambda line: print(line, flush=True))
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="compare_runs.py",
        description=__doc__,
        formatter_class=HelpFormatter,
        epilog=f"DEFAULTS: {' '.join(DEFAULTS)}",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--solvers",
        nargs="+",
        default=["sgd", "lp-sgd", "svrg", "lp-svrg", "bc-svrg"],
        choices=SOLVERS,
        help="in the order of the table",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        default=str(REPOSITORY / "outputs" / "comparison"),
        help="a folder for each solver's metrics is made there",
    )
    parser.add_argument(
        "--figure", metavar="FILE", help="image to write; by default DIR/convergence.png"
    )
    return parser


def _settings(solvers: Sequence[str], output: str, flags: Sequence[str]) -> list[Settings]:
    if any(flag.split("=")[0] == "--solver" for flag in flags):
        raise UsageError("name the solvers to compare with --solvers, not --solver")
    settings = [
        parse([*DEFAULTS, *flags, f"--solver={solver}", f"--output={Path(output) / solver}"])
        for solver in dict.fromkeys(solvers)
    ]
    if any(each.resnet_save_epochs for each in settings[1:]):
        raise UsageError(
            "--resnet-save-ckpt would write the same files for several solvers: save with "
            "run_models.py, or name one solver with --solvers"
        )
    return settings


def _title(settings: Settings) -> str:
    return f"{settings.model} on {settings.dataset}"


def _label(settings: Settings) -> str:
    title = SOLVERS[settings.solver].title
    return f"{title} ({settings.format or settings.offset_dtype})"


def _labelled(
    runs: Mapping[Settings, Sequence[EpochRecord]],
) -> dict[str, Sequence[EpochRecord]]:
    return {_label(settings): records for settings, records in runs.items()}


def _table(runs: Mapping[Settings, Sequence[EpochRecord]]) -> str:
    """Rows of the last records; the gap is to the lowest training loss among them."""
    finals = {settings: records[-1] for settings, records in runs.items()}
    best = min((r.train_loss for r in finals.values() if math.isfinite(r.train_loss)), default=0.0)
    lines = [f"{'solver':22} {'loss gap':>10} {'gradient':>10} {'accuracy':>10} {'seconds':>10}"]
    for settings, record in finals.items():
        seconds = sum(r.seconds for r in runs[settings])
        lines.append(
            f"{_label(settings):22} {record.train_loss - best:10.1e} {record.grad_norm:10.1e} "
            f"{record.test_accuracy:10.2%} {seconds:10.1f}"
        )
    lines.append("loss gap: to the lowest training loss of these runs; all at the last epoch")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
