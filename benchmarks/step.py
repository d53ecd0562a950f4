"""Time one inner step of every solver against torch.optim.SGD, as ratios within one run.

The models have the size of the experiments': logistic regression of MNIST (784 → 10, batch 100),
LeNet (batch 128), the LSTM tagger (16 sentences of 45 words) and ResNet-18 of width 16 (batch 32);
momentum 0.9. Every round times all solvers one after another, so that what else the machine does
hits them alike; a ratio is the median over rounds.

    python benchmarks/step.py [--model=logreg] [--threads=2] [--rounds=30] [--steps=50]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halp
from halp.models import LeNet, LogisticRegression, LSTMTagger, ResNet18

LEARNING = {"lr": 0.05, "momentum": 0.9}


class Problem(NamedTuple):
    """A model, and the shapes of a batch; word indices where there is a vocabulary."""

    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    labels: tuple[int, ...]
    n_words: int | None = None

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels, the same at every call."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 10, self.labels, generator=generator)
        if self.n_words is None:
            return torch.rand(self.inputs, generator=generator), labels
        return torch.randint(0, self.n_words, self.inputs, generator=generator), labels


PROBLEMS = {
    "logreg": Problem(lambda: LogisticRegression(784, 10), (100, 784), (100,)),
    "lenet": Problem(lambda: LeNet(3, 10), (128, 3, 32, 32), (128,)),
    "lstm": Problem(lambda: LSTMTagger(6762, 12), (16, 45), (16, 45), 6762),
    "resnet": Problem(lambda: ResNet18(3, 10, width=16), (32, 3, 32, 32), (32,)),
}


def make_step(name: str, problem: Problem, rounding: str) -> Callable[[], None]:
    """Return a function that does one step of the solver, after a snapshot where it needs one."""
    torch.manual_seed(0)
    model, (x, y) = problem.build(), problem.batch()
    if name.startswith("bc-"):
        halp.bit_center(model, "fp16", rounding)
    low = {"format": "fp16", "rounding": rounding}
    outer = {"T": 10**9}
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = {
        "torch": lambda: torch.optim.SGD(parameters, foreach=True, **LEARNING),
        "sgd": lambda: halp.optim.SGD(parameters, foreach=True, **LEARNING),
        "lp-sgd": lambda: halp.optim.LPSGD(parameters, **LEARNING, **low),
        "svrg": lambda: halp.optim.SVRG(parameters, foreach=True, **LEARNING, **outer),
        "lp-svrg": lambda: halp.optim.LPSVRG(parameters, **LEARNING, **outer, **low),
        "bc-sgd": lambda: halp.optim.BitCenterSGD(parameters, **LEARNING, **outer),
        "bc-svrg": lambda: halp.optim.BitCenterSVRG(parameters, **LEARNING, **outer),
    }[name]()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    if getattr(optimizer, "snapshot_due", False):
        optimizer.snapshot([(x, y)], lambda *_: closure())  # type: ignore[attr-defined]
    return lambda: optimizer.step(closure)  # type: ignore[arg-type, return-value]


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=PROBLEMS, default="logreg")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounding", choices=("near", "stoc", "void"), default="near")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    problem = PROBLEMS[args.model]
    names = ["torch", "sgd", "lp-sgd", "svrg", "lp-svrg", "bc-sgd", "bc-svrg"]
    steps = {name: make_step(name, problem, args.rounding) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(args.rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(args.steps):
                step()
            if round_ >= 2:  # the first rounds warm up
                times[name].append((time.perf_counter() - start) / args.steps)
    print(f"{args.model}, inputs {problem.inputs}, fp16 {args.rounding}, {args.threads} threads")
    print(f"{'solver':<10}{'us a step':>12}{'ratio to torch.optim.SGD':>28}")
    for name in names:
        ratio = statistics.median(t / b for t, b in zip(times[name], times["torch"], strict=True))
        print(f"{name:<10}{1e6 * statistics.median(times[name]):>12.0f}{ratio:>28.2f}")


if __name__ == "__main__":
    main()
