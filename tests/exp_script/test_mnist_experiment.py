"""The reference experiment: softmax regression on all of MNIST, ten epochs."""

import functools
from pathlib import Path

import pytest

from halp.training import read_metrics
from run_models import main

pytestmark = pytest.mark.slow

FLAGS = (
    "--n-epochs=10 --batch-size=100 --reg=1e-5 --alpha=0.05 --momentum=0.9 --seed=1 --n-classes=10 "
    "-T=600 --dataset=mnist --model=logreg"
)


@pytest.fixture(scope="module")
def losses(halp_data: Path, tmp_path_factory):
    """Runs a solver with a rounding, once; returns its training loss at each epoch."""

    @functools.cache
    def run(solver: str, rounding: str) -> list[float]:
        folder = tmp_path_factory.mktemp(f"{solver}-{rounding}")
        flags = [f"--solver={solver}", f"--rounding={rounding}", f"--data-dir={halp_data}"]
        assert main([*FLAGS.split(), *flags, f"--output={folder}"]) == 0
        records = read_metrics(folder)
        if solver == "svrg":
            assert records[10].test_accuracy >= 0.92
        return [record.train_loss for record in records]

    return run


def test_svrg_reaches_the_known_loss(losses):
    assert losses("svrg", "void")[10] == pytest.approx(0.251, abs=0.002)


@pytest.mark.parametrize(
    "rounded, exact",
    [
        (("bc-svrg", "near"), "svrg"),
        (("bc-svrg", "stoc"), "svrg"),
        (("bc-sgd", "near"), "sgd"),
    ],
)
def test_bit_centered_solvers_follow_the_full_precision_ones(losses, rounded, exact):
    assert losses(*rounded) == pytest.approx(losses(exact, "void"), abs=1e-3)


def test_low_precision_svrg_stays_behind(losses):
    assert losses("lp-svrg", "near")[10] > losses("svrg", "void")[10] + 5e-3
