"""Claims about what a run leaves behind."""

import json
import math

import pytest

from halp.training import EpochRecord, RecordError, RunFolder, read_config, read_metrics

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


# Files that were edited, or saved by something else.

ENCODINGS = ["utf-8-sig", "utf-16", "utf-32"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_byte_order_mark_changes_no_configuration_and_no_row(tmp_path, encoding):
    with RunFolder(tmp_path, {"seed": 1}) as folder:
        folder.write(record(0))
        folder.write(record(1))
    for name in ("config.json", "metrics.jsonl"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        (tmp_path / name).write_bytes(text.replace("\n", "\r\n").encode(encoding))
    assert read_config(tmp_path) == {"seed": 1}
    assert read_metrics(tmp_path) == [record(0), record(1)]


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_rows_may_end_in_any_way_and_the_last_one_in_none(tmp_path, end):
    rows = [record(0), record(1)]
    (tmp_path / "metrics.jsonl").write_text(end.join(row.to_json() for row in rows), newline="")
    assert read_metrics(tmp_path) == rows


@pytest.mark.parametrize(
    "line",
    [
        "x" * 300_000,
        "[" * 300_000,
        "3",
        '{"epoch": 1}',
        record().to_json().replace("0.5", '"half"'),
        record().to_json().replace('"epoch"', '"batch"'),
    ],
    ids=len,
)
def test_a_line_that_is_no_row_is_named_and_not_quoted_at_length(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f"{record().to_json()}\n{line}\n")
    with pytest.raises(RecordError) as refused:
        read_metrics(tmp_path)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / 'metrics.jsonl'}, line 2: a row of a run's metrics")
    assert len(message) < 500


def test_rows_of_another_encoding_are_refused_with_their_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(record().to_json().encode() + b"\n\xe9\n")
    with pytest.raises(RecordError, match="line 2: the byte 0xe9 is not UTF-8"):
        read_metrics(tmp_path)


def test_rows_that_are_not_there_are_a_sentence(tmp_path):
    with pytest.raises(RecordError, match=r"metrics.jsonl cannot be read: No such file"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("content", [b"\xe9", b"[" * 300_000, b'{"a": ' + b"x" * 300_000])
def test_a_configuration_that_cannot_be_read_is_refused_in_a_short_sentence(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(RecordError, match="config.json cannot be read: ") as refused:
        read_config(tmp_path)
    assert len(str(refused.value)) < 700


def test_a_run_goes_on_whatever_its_rows_were_saved_as(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        folder.write(record(0))
    (tmp_path / "metrics.jsonl").write_bytes("\ufeffcaf\xe9".encode("utf-16"))
    with RunFolder(tmp_path, None) as folder:
        folder.write(record(1))
    assert read_metrics(tmp_path) == [record(1)]
