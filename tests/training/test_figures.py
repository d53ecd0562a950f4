"""Claims about figures, checked on their pixels."""

import math
import subprocess
import sys

import numpy
import pytest

from halp.training import EpochRecord, plot_convergence


def curve(values):
    return [EpochRecord(epoch, value, value, value, 0.5, 1.0) for epoch, value in enumerate(values)]


FALLING = [10.0**-k for k in range(10)]


def has_color(path, color: str) -> bool:
    """Whether the colour, written as #rrggbb, fills some pixels."""
    import matplotlib.image

    pixels = matplotlib.image.imread(path)[..., :3]
    wanted = numpy.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return bool((numpy.abs(pixels - wanted).max(-1) < 0.02).sum() > 20)


def test_a_png_of_the_runs_is_written_into_a_folder_that_need_not_exist(tmp_path):
    path = tmp_path / "new" / "figure.png"
    plot_convergence({"SGD": curve(FALLING)}, path, title="digits")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 200_000


def test_curves_that_coincide_are_all_seen(tmp_path):
    """In the demo's order, the third and the fifth run coincide: SVRG and HALP."""
    path = tmp_path / "figure.png"
    flat = [1e-3] * 10
    plot_convergence(
        {
            "SGD": curve(flat),
            "LP-SGD": curve(flat),
            "SVRG": curve(FALLING),
            "LP-SVRG": curve(flat),
            "HALP": curve(FALLING),
        },
        path,
    )
    assert has_color(path, "#56B4E9")
    assert has_color(path, "#000000")
    assert has_color(path, "#E69F00")


def test_values_that_have_no_place_on_a_log_scale_are_left_out(tmp_path):
    path = tmp_path / "figure.png"
    plot_convergence({"diverged": curve([1.0, math.inf, math.nan, 0.0, -1.0])}, path)
    assert path.exists()


def test_an_unknown_quantity_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'speed' cannot be drawn: choose one of train_loss"):
        plot_convergence({"a": curve([1.0])}, tmp_path / "figure.png", quantity="speed")


def test_drawing_needs_no_display_and_matplotlib_loads_only_when_something_is_drawn(tmp_path):
    code = f"""
import pathlib, sys
from halp.training import plot_convergence
assert "matplotlib" not in sys.modules
plot_convergence({{"a": []}}, pathlib.Path({str(tmp_path / "figure.png")!r}))
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"MPLBACKEND": "TkAgg"})
