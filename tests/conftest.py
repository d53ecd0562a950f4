"""Fixtures shared by all tests."""

import os
from pathlib import Path

# The tensors of the tests are small: more threads than one only get in each other's way, and tests
# run in several processes. NumPy's linear algebra reads this when it is first imported; with
# another number of threads its last bits are others. Two show what threads may move.
THREADS = os.environ.get("HALP_TEST_THREADS", "1")
os.environ["OMP_NUM_THREADS"] = THREADS

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(int(THREADS))


@pytest.fixture(scope="session")
def halp_data() -> Path:
    """The folder with real data that $HALP_DATA names; without it the test skips."""
    folder = os.environ.get("HALP_DATA")
    if not folder:
        pytest.skip("needs real data: $HALP_DATA is not set")
    if not Path(folder).is_dir():
        pytest.skip(f"needs real data: $HALP_DATA is {folder}, which is not a folder")
    return Path(folder)
