"""The reference experiments of LeNet, the tagger and ResNet, on a part of their data.

HALP in fp16 follows float32 SVRG: its training loss is within one per cent, epoch by epoch. (With
learning rates that are several times larger, training is chaotic and follows nothing.)
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halp.training import read_metrics
from run_models import main
from tables import REPOSITORY

pytestmark = pytest.mark.slow

LENET = (
    "--model=lenet --dataset=cifar10 --batch-size=64 --reg=0.0005 --alpha=0.005 --momentum=0.9 "
    "--seed=1 --n-epochs=5"
)
TAGGER = (
    "--model=lstm --dataset=conll2000 --batch-size=16 --alpha=0.5 --seed=3 --n-epochs=2 -T=279 "
    "--limit-train=640"
)
RESNET = (
    "--model=resnet --resnet-width=4 --batch-size=64 --reg=0.0005 --alpha=0.002 --momentum=0.9 "
    "--seed=1 --n-epochs=3 --limit-train=640"
)


@pytest.fixture
def losses(tmp_path):
    """Runs a command line with a solver; returns its training loss at each epoch."""

    def run(flags: str, solver: str) -> list[float]:
        folder = tmp_path / solver
        assert main([*flags.split(), f"--solver={solver}", f"--output={folder}"]) == 0
        return [record.train_loss for record in read_metrics(folder)]

    return run


def assert_follows(halp: list[float], svrg: list[float]) -> None:
    assert svrg[-1] < 0.95 * svrg[0], "nothing was learned"
    assert halp == pytest.approx(svrg, rel=0.01)


def test_lenet_follows_svrg_and_low_precision_svrg_stays_behind(losses, halp_data):
    flags = f"{LENET} --data-dir={halp_data / 'cifar10-subset'}"
    svrg = losses(flags, "svrg")
    halp = losses(flags, "bc-svrg")
    assert_follows(halp, svrg)
    assert losses(flags, "lp-svrg")[-1] - svrg[-1] > 3 * abs(halp[-1] - svrg[-1])


def test_the_tagger_follows_svrg(losses, halp_data: Path, tmp_path):
    command = [sys.executable, "utils/postag_data_utils.py", f"--output={tmp_path / 'conll2000'}"]
    environment = {**os.environ, "HALP_DATA": str(halp_data)}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True)
    flags = f"{TAGGER} --data-dir={tmp_path}"
    assert_follows(losses(flags, "bc-svrg"), losses(flags, "svrg"))


def test_resnet_follows_svrg(losses):
    assert_follows(losses(RESNET, "bc-svrg"), losses(RESNET, "svrg"))
