"""The runner's command line, and the settings that it resolves to."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from flags import (
    HelpFormatter,
    Parser,
    UsageError,
    any_of,
    count,
    format_name,
    interval,
    non_negative,
    positive,
    rounding,
    scale,
    seed,
)
from halp import formats
from halp.grid import ROUNDINGS
from halp.messages import shortened
from tables import DATASETS, DATASETS_OF_WORDS, MODELS, REPOSITORY, SOLVERS

RESNET_WIDTH = 64
RESNET_SAVE_EPOCHS = (1, 300)
RESNET_LR_DROPS = (150, 250)
"""By default of a run that saves checkpoints: the recipe that the fine-tuning experiment is of."""

CHECKPOINT_EVERY = "1e"
"""By default of a run with an output folder: often enough to lose little."""

SAVING = ("sgd", "lp-sgd")
"""Solvers that save checkpoints; every solver loads them."""


@dataclass(frozen=True)
class Settings:
    """One run. A setting that the solver or the model has no use for is None."""

    dataset: str
    model: str
    solver: str
    format: str | None
    rounding: str | None
    scale: str | float | None  # "none", "auto" or a number
    mu: float | None
    T: int | None  # None with an outer loop: one epoch, known once the data is there
    alpha: float
    momentum: float
    reg: float
    batch_size: int
    n_epochs: int
    n_classes: int | None  # None: as many as the data set has
    seed: int
    shuffle: bool
    augment: bool
    limit_train: int | None
    offset_dtype: str
    on_site_compute: bool  # else bc-* cache offsets
    offset_cache_dir: str | None  # None: cached offsets are kept in memory
    cuda: bool
    measure_every: int
    on_overflow: str  # "stop" or "warn"
    data_dir: str
    output: str | None
    checkpoint_every: str | None  # steps, as in "500", or epochs, as in "1e"; None without output
    resnet_width: int | None
    resnet_lr_drops: tuple[int, ...]  # epochs after which the learning rate falls to a tenth
    resnet_save_epochs: tuple[int, ...]  # those that the run reaches; none: nothing is saved
    resnet_load_epoch: int | None  # None: nothing is loaded
    resnet_save_folder: str | None
    resnet_load_folder: str | None
    resnet_fine_tune: bool
    resume: bool = False  # whether to go on with the run that the output folder holds
    command: tuple[str, ...] = field(default=(), compare=False)  # what this was parsed from

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the high-precision work."""
        return {"float32": torch.float32, "float64": torch.float64}[self.offset_dtype]

    @property
    def device(self) -> torch.device:
        """Where the run happens."""
        return torch.device("cuda" if self.cuda else "cpu")


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Turn a command line into settings.

    Raises:
        UsageError: it cannot be carried out, whatever the data.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser().parse_args(argv)
    if args.resume is not None:
        raise UsageError("--resume is for run_models.py, and for one run")
    _known("model", args.model, MODELS)
    _known("dataset", args.dataset, DATASETS)
    _known("solver", args.solver, SOLVERS)
    solver = SOLVERS[args.solver]
    if args.cuda and not torch.cuda.is_available():
        raise UsageError(
            "--cuda was given, but PyTorch finds no CUDA device: leave it out to run on the CPU"
        )
    _check_data(args)
    _check_mu(args)
    _check_augment(args)
    _check_output(args)
    _check_cache(args)
    _check_resnet(args)
    saves = args.resnet_save_ckpt
    return Settings(
        dataset=args.dataset,
        model=args.model,
        solver=args.solver,
        format=args.format if solver.rounds else None,
        rounding=args.rounding if solver.rounds else None,
        scale=(args.scale or solver.default_scale) if solver.rounds else None,
        mu=args.mu,
        T=args.T if solver.outer_loop else None,
        alpha=args.alpha,
        momentum=args.momentum,
        reg=args.reg,
        batch_size=args.batch_size,
        n_epochs=args.n_epochs,
        n_classes=args.n_classes,
        seed=args.seed,
        shuffle=args.shuffle,
        augment=args.augment,
        limit_train=args.limit_train,
        offset_dtype=args.offset_dtype,
        on_site_compute=solver.bit_centered and _on_site(args),
        offset_cache_dir=args.offset_cache_dir,
        cuda=args.cuda,
        measure_every=args.measure_every,
        on_overflow=args.on_overflow,
        data_dir=str(args.data_dir or os.environ.get("HALP_DATA") or REPOSITORY / "datasets"),
        output=args.output,
        checkpoint_every=args.checkpoint_every or (CHECKPOINT_EVERY if args.output else None),
        resnet_width=(args.resnet_width or RESNET_WIDTH) if args.model == "resnet" else None,
        resnet_lr_drops=_epochs(args.resnet_lr_drops, RESNET_LR_DROPS if saves else ()),
        resnet_save_epochs=_save_epochs(args) if saves else (),
        resnet_load_epoch=args.resnet_load_ckpt_epoch_id,
        resnet_save_folder=args.resnet_save_ckpt_path if saves else None,
        resnet_load_folder=args.resnet_load_ckpt_path or args.resnet_save_ckpt_path,
        resnet_fine_tune=args.resnet_fine_tune,
        command=tuple(argv),
    )


def make_parser() -> Parser:
    """Make the parser of every flag."""
    parser = Parser(
        prog="run_models.py",
        description="Train one model on one data set with one solver, and measure it every epoch.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("--dataset", default="digits", help=any_of(DATASETS))
    what.add_argument("--model", default="logreg", help=any_of(MODELS))
    what.add_argument("--solver", default="bc-svrg", help=any_of(SOLVERS))
    what.add_argument("-e", "--n-epochs", type=count, default=10, help="epochs")
    what.add_argument("-bs", "--batch-size", type=count, default=32, help="minibatch size")
    what.add_argument(
        "-c", "--n-classes", type=count, help="classes; by default as many as the data set has"
    )
    what.add_argument("-s", "--seed", type=seed, default=0, help="of everything random")
    what.add_argument("--shuffle", action="store_true", help="reorder the samples every epoch")
    what.add_argument(
        "--augment", action="store_true", help="crop and flip training images at random"
    )
    what.add_argument("--limit-train", type=count, metavar="N", help="first N samples only")
    what.add_argument("--cuda", action="store_true", help="run on the GPU")

    steps = parser.add_argument_group("steps")
    steps.add_argument("-a", "--alpha", type=non_negative, default=0.1, help="learning rate")
    steps.add_argument("-m", "--momentum", type=non_negative, default=0.0, help="momentum")
    steps.add_argument("--reg", type=non_negative, default=0.0, help="L2 regularization λ")
    steps.add_argument(
        "-T",
        "--T",
        type=count,
        help="inner steps between full gradients, by default one epoch; "
        "ignored by solvers without an outer loop",
    )

    arithmetic = parser.add_argument_group("arithmetic (format, rounding, scale: lp-* and bc-*)")
    arithmetic.add_argument(
        "--format",
        type=format_name,
        default="fp16",
        help=f"{', '.join(formats.names())}, eXmY (as in e5m7) or fixedB (as in fixed8)",
    )
    arithmetic.add_argument("--rounding", type=rounding, default="near", help=any_of(ROUNDINGS))
    arithmetic.add_argument(
        "--scale", type=scale, help="none, auto or a number; by default auto in bc-*, else none"
    )
    arithmetic.add_argument(
        "--mu",
        type=positive,
        help="of bc-svrg in fixed point: the range of z is ‖full gradient‖ / mu",
    )
    arithmetic.add_argument(
        "--offset-dtype",
        choices=("float32", "float64"),
        default="float32",
        help="dtype of the high-precision work",
    )
    arithmetic.add_argument(
        "--on-site-compute",
        action="store_true",
        help="of bc-*: compute offsets where they are needed, as with --shuffle and --augment; "
        "by default each full gradient keeps them for the inner steps, in the format",
    )
    arithmetic.add_argument(
        "--offset-cache-dir",
        metavar="DIR",
        help="keep cached offsets in a memory-mapped file there, by default in memory",
    )

    files = parser.add_argument_group("files and measuring")
    files.add_argument("--data-dir", help="by default $HALP_DATA, else the repository's datasets/")
    files.add_argument(
        "--output", metavar="DIR", help="write config.json, metrics.jsonl and checkpoints there"
    )
    files.add_argument(
        "--checkpoint-every",
        type=interval,
        metavar="N",
        help="make a checkpoint every N steps, or every N epochs as in 2e, and always at the end; "
        f"by default {CHECKPOINT_EVERY} with --output",
    )
    files.add_argument(
        "--resume",
        metavar="DIR",
        help="go on with the run in DIR, with all its flags; --n-epochs may be raised, "
        "--checkpoint-every and --data-dir changed",
    )
    files.add_argument(
        "--measure-every", type=count, default=1, metavar="N", help="measure every N epochs"
    )

    files.add_argument(
        "--on-overflow",
        choices=("stop", "warn"),
        default="stop",
        help="what to do when a loss, a gradient or a delta holds NaN or infinity",
    )

    _add_resnet_flags(parser)
    return parser


def _add_resnet_flags(parser: Parser) -> None:
    group = parser.add_argument_group("checkpoints and fine-tuning (--model=resnet)")
    group.add_argument(
        "--resnet-width",
        type=count,
        metavar="N",
        help=f"channels of the first stage, by default {RESNET_WIDTH}",
    )
    group.add_argument(
        "--resnet-save-ckpt", action="store_true", help="save checkpoints; for sgd and lp-sgd"
    )
    group.add_argument("--resnet-save-ckpt-path", metavar="DIR", help="folder to save into")
    group.add_argument(
        "--resnet-load-ckpt-path",
        metavar="DIR",
        help="folder to load from, by default that of --resnet-save-ckpt-path",
    )
    group.add_argument(
        "--resnet-save-epochs",
        type=count,
        nargs="+",
        metavar="E",
        help="save after these epochs, by default "
        f"{' '.join(map(str, RESNET_SAVE_EPOCHS))}, and always after the last",
    )
    group.add_argument(
        "--resnet-lr-drops",
        type=count,
        nargs="*",
        metavar="E",
        help="divide the learning rate by 10 after these epochs; by default "
        f"{' '.join(map(str, RESNET_LR_DROPS))} with --resnet-save-ckpt, else none",
    )
    group.add_argument(
        "--resnet-load-ckpt", action="store_true", help="start from a checkpoint, with any solver"
    )
    group.add_argument(
        "--resnet-load-ckpt-epoch-id", type=count, metavar="E", help="epoch of that checkpoint"
    )
    group.add_argument(
        "--resnet-fine-tune",
        action="store_true",
        help="train the last layer of the loaded checkpoint only",
    )


def _check_resnet(args: argparse.Namespace) -> None:
    given = {
        f"--{name.replace('_', '-')}"
        for name, value in vars(args).items()
        if name.startswith("resnet_") and value is not None and value is not False
    }
    if given and args.model != "resnet":
        raise UsageError(f"{min(given)} is for --model=resnet, not for --model={args.model}")
    saves, loads, folder = "--resnet-save-ckpt", "--resnet-load-ckpt", "--resnet-save-ckpt-path"
    if loads in given and not given & {folder, "--resnet-load-ckpt-path"}:
        raise UsageError(f"{loads} was given without --resnet-load-ckpt-path: add the folder")
    for flag, needed in (
        (saves, folder),
        ("--resnet-load-ckpt-path", loads),
        (loads, "--resnet-load-ckpt-epoch-id"),
        ("--resnet-load-ckpt-epoch-id", loads),
        ("--resnet-fine-tune", loads),
        ("--resnet-save-epochs", saves),
    ):
        if flag in given and needed not in given:
            raise UsageError(f"{flag} was given without {needed}: add it, or leave {flag} out")
    if folder in given and not given & {saves, loads}:
        raise UsageError(f"{folder} was given, but neither {saves} nor {loads}: add one of them")
    if saves in given and args.solver not in SAVING:
        raise UsageError(
            f"{saves} is for --solver={any_of(SAVING)}, not for --solver={args.solver}"
        )


def _save_epochs(args: argparse.Namespace) -> tuple[int, ...]:
    epochs = (*_epochs(args.resnet_save_epochs, RESNET_SAVE_EPOCHS), args.n_epochs)
    return tuple(sorted({epoch for epoch in epochs if epoch <= args.n_epochs}))


def _epochs(given: Sequence[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    return default if given is None else tuple(sorted(set(given)))


def _check_data(args: argparse.Namespace) -> None:
    words = args.dataset in DATASETS_OF_WORDS
    if words != MODELS[args.model].takes_words:
        fitting = [name for name, entry in MODELS.items() if entry.takes_words == words]
        raise UsageError(
            f"--dataset={args.dataset} holds {'sentences' if words else 'images'}, which "
            f"--model={args.model} does not take: choose --model={any_of(fitting)}"
        )


def _check_augment(args: argparse.Namespace) -> None:
    if args.augment and not MODELS[args.model].takes_images:
        images = [name for name, entry in MODELS.items() if entry.takes_images]
        raise UsageError(f"--augment is for --model={any_of(images)}, not for --model={args.model}")


def _check_output(args: argparse.Namespace) -> None:
    if args.checkpoint_every is not None and args.output is None:
        raise UsageError(
            f"--checkpoint-every={args.checkpoint_every} was given without --output: add the "
            "folder that checkpoints are written into"
        )


def _on_site(args: argparse.Namespace) -> bool:
    """Whether offsets have to be computed on site: a cache needs the same batches every epoch."""
    return args.on_site_compute or args.shuffle or args.augment


def _check_cache(args: argparse.Namespace) -> None:
    if args.offset_cache_dir is None:
        return
    caching = [name for name, entry in SOLVERS.items() if entry.bit_centered]
    if args.solver not in caching:
        raise UsageError(
            f"--offset-cache-dir is for --solver={any_of(caching)}, not for --solver={args.solver}"
        )
    if _on_site(args):
        flags = ("on_site_compute", "shuffle", "augment")
        given = next(f"--{name.replace('_', '-')}" for name in flags if getattr(args, name))
        raise UsageError(
            f"--offset-cache-dir was given together with {given}, with which offsets are computed "
            "on site and nothing is cached: leave one of them out"
        )


def _check_mu(args: argparse.Namespace) -> None:
    if args.mu is None:
        return
    if args.solver != "bc-svrg" or not isinstance(formats.get(args.format), formats.FixedFormat):
        raise UsageError(
            f"--mu={args.mu:g} is for --solver=bc-svrg in fixed point (--format=fixed8), not for "
            f"--solver={args.solver} in {args.format}"
        )


def _known(flag: str, value: str, table: Mapping[str, object]) -> None:
    if value not in table:
        raise UsageError(f"--{flag}={shortened(value)} is not available: choose {any_of(table)}")
