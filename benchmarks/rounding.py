"""Time rounding of one million float32 values, in plain copies (``x.clone()``) within one run.

Each round times everything once, one after the other, so that what else the machine does hits all
alike; a ratio is the median over rounds. Other simulators are timed where they are installed.

    python benchmarks/rounding.py [--threads=2] [--rounds=50] [--size=1000000] [--no-compile]
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halp import quantize

FORMATS = ("fp16", "bf16", "fp8_e4m3", "fixed8", "mxfp8_e4m3")
MODES = ("near", "stoc")
#: What the project holds itself to, for fp16 and fp8: copies, eager and compiled.
BOUNDS = {"near": (8, 3), "stoc": (40, 6)}


def ours(x: Tensor, compiled: bool) -> dict[str, Callable[[], object]]:
    """Return what to time of halp, by name."""
    timed = {}
    for format in FORMATS:
        for mode in MODES:
            timed[f"halp {format} {mode}"] = _rounding(format, mode, x)
            if compiled:
                timed[f"halp {format} {mode}, compiled"] = _compiled(format, mode, x)
    return timed


def _rounding(format: str, mode: str, x: Tensor) -> Callable[[], object]:
    return lambda: quantize(x, format, mode, seed=0)


def _compiled(format: str, mode: str, x: Tensor) -> Callable[[], object]:
    """Return a compiled function with code of its own, so that none looks through the others'."""
    code: dict[str, Any] = {"quantize": quantize}
    exec("def rounded(x): return quantize(x, format, mode, seed=0)", code)
    code |= {"format": format, "mode": mode}
    function = torch.compile(code["rounded"], fullgraph=True)
    return lambda: function(x)


def others(x: Tensor) -> dict[str, Callable[[], object]]:
    """Return what to time of other libraries that are installed."""
    timed: dict[str, Callable[[], object]] = {"torch.rand_like": lambda: torch.rand_like(x)}
    array = x.numpy()
    if importlib.util.find_spec("ml_dtypes"):
        import ml_dtypes

        timed["ml_dtypes fp8_e4m3 near"] = lambda: array.astype(ml_dtypes.float8_e4m3fn)
    if importlib.util.find_spec("gfloat"):
        import gfloat
        from gfloat.formats import format_info_binary16

        timed["gfloat fp16 near"] = lambda: gfloat.round_ndarray(format_info_binary16, array)
    if importlib.util.find_spec("qtorch"):
        from qtorch.quant import float_quantize

        for mode, name in (("near", "nearest"), ("stoc", "stochastic")):
            timed[f"qtorch fp16 {mode}"] = _qtorch(float_quantize, x, name)
    return timed


def _qtorch(quantize: Callable, x: Tensor, rounding: str) -> Callable[[], object]:
    return lambda: quantize(x, exp=5, man=10, rounding=rounding)


def measure(timed: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for round_ in range(rounds + 3):
        for name, function in timed.items():
            repeats = 1 if name.startswith(("gfloat", "qtorch")) else 5
            function()  # into the caches
            start = time.perf_counter()
            for _ in range(repeats):
                function()
            if round_ >= 3:  # the first rounds warm up
                times[name].append((time.perf_counter() - start) / repeats)
    return times


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # As in any process that has trained something: memory that was freed is kept for reuse.
    torch.ones(8_000_000)
    x = torch.randn(args.size, generator=torch.Generator().manual_seed(0))
    timed = {"copy": x.clone, **ours(x, not args.no_compile), **others(x)}
    times = measure(timed, args.rounds)
    copies = times.pop("copy")
    print(f"{args.size} float32 values, {args.threads} threads; a copy takes", end=" ")
    print(f"{1e6 * statistics.median(copies):.0f} us")
    print(f"{'':<36}{'copies':>8}{'bound':>8}")
    for name, seconds in times.items():
        ratio = statistics.median(t / c for t, c in zip(seconds, copies, strict=True))
        print(f"{name:<36}{ratio:>8.1f}{_bound(name):>8}")


def _bound(name: str) -> str:
    words = name.replace(",", "").split()
    if words[0] != "halp" or words[1] not in ("fp16", "fp8_e4m3"):
        return ""
    return str(BOUNDS[words[2]]["compiled" in words])


if __name__ == "__main__":
    main()
