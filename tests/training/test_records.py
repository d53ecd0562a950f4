"""Claims about what a run leaves behind."""

import json
import math

import pytest

from halp.training import EpochRecord, RecordError, RunFolder, read_metrics

KEYS = ["epoch", "train_loss", "grad_norm", "test_loss", "test_accuracy", "seconds"]


def record(epoch=1, **values) -> EpochRecord:
    numbers = {
        "train_loss": 0.5,
        "grad_norm": 0.25,
        "test_loss": 1.5,
        "test_accuracy": 0.75,
        "seconds": 2.0,
    }
    return EpochRecord(epoch=epoch, **(numbers | values))


def test_a_row_has_exactly_the_agreed_keys():
    assert list(json.loads(record().to_json())) == KEYS


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_written_as_null(value):
    line = record(train_loss=value).to_json()
    assert json.loads(line)["train_loss"] is None
    assert json.loads(line)["grad_norm"] == 0.25


def test_numbers_keep_every_digit():
    assert json.loads(record(grad_norm=1 / 3).to_json())["grad_norm"] == 1 / 3


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path):
    with RunFolder(tmp_path / "a" / "b", {"seed": 1}) as folder:
        for epoch in range(3):
            folder.write(record(epoch))
            assert len(read_metrics(tmp_path / "a" / "b")) == epoch + 1
    assert json.loads((tmp_path / "a" / "b" / "config.json").read_text()) == {"seed": 1}


def test_what_is_read_back_is_what_was_written(tmp_path):
    with RunFolder(tmp_path / "run", {}) as folder:
        folder.write(record(0))
        folder.write(record(1, train_loss=math.nan))
    first, second = read_metrics(tmp_path / "run")
    assert first == record(0)
    assert math.isnan(second.train_loss) and second.grad_norm == 0.25


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_a_folder_that_holds_a_run_is_refused_and_keeps_it(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(RecordError, match="already holds a run"):
        RunFolder(tmp_path, {})
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [(name, "precious")]


def test_a_folder_with_other_files_is_accepted(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with RunFolder(tmp_path, {}) as folder:
        folder.write(record())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"output folder .*file/run cannot be written: Not a dir"):
        RunFolder(tmp_path / "file" / "run", {})
