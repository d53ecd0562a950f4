"""Time ``import halp`` against ``import torch`` alone, each in a fresh interpreter, by turns.

python benchmarks/import_time.py [--rounds=7]
"""

import argparse
import statistics
import subprocess
import sys
import time


def seconds(module: str) -> float:
    """Return how long a fresh interpreter takes to import a module."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Print both medians and their difference."""
    parser = argparse.ArgumentParser(description="Time import halp against import torch alone.")
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    seconds("halp")  # warms the file cache up
    pairs = [(seconds("torch"), seconds("halp")) for _ in range(rounds)]
    torch_time, halp_time = (statistics.median(times) for times in zip(*pairs, strict=True))
    difference = statistics.median(halp - torch for torch, halp in pairs)
    print(f"import torch {torch_time:.2f} s, import halp {halp_time:.2f} s: {difference:+.2f} s")


if __name__ == "__main__":
    main()
