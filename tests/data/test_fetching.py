"""Claims about downloads and what is moved into place: nothing that is there is replaced."""

import errno
import os
from pathlib import Path

import pytest

from halp.data.fetching import fresh_folder, move_where_nothing_is


@pytest.fixture
def source(tmp_path) -> Path:
    """A folder with a file."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("new")
    return tmp_path / "source"


@pytest.fixture(params=[True, False], ids=["links", "no links"])
def links(request, monkeypatch) -> None:
    """A file system that has hard links, and one that has none."""

    def refuse(*arguments):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not request.param:
        monkeypatch.setattr(os, "link", refuse)


def test_a_file_is_moved_to_where_nothing_is(tmp_path, source, links):
    move_where_nothing_is(source / "file", tmp_path / "some" / "where")
    assert (tmp_path / "some" / "where").read_text() == "new"
    assert not (source / "file").exists()


@pytest.mark.parametrize("dangling", [False, True])
def test_a_file_takes_no_other_files_place(tmp_path, source, links, dangling):
    target = tmp_path / "target"
    target.symlink_to(tmp_path / "nowhere") if dangling else target.write_text("old")
    with pytest.raises(FileExistsError):
        move_where_nothing_is(source / "file", target)
    assert target.is_symlink() if dangling else target.read_text() == "old"
    assert (source / "file").read_text() == "new"


def test_a_folder_takes_an_empty_folders_place(tmp_path, source):
    (tmp_path / "target").mkdir()
    move_where_nothing_is(source, tmp_path / "target")
    assert (tmp_path / "target" / "file").read_text() == "new"


def test_a_folder_takes_no_other_place(tmp_path, source):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other").write_text("old")
    (tmp_path / "file").write_text("old")
    for target, content in (("folder", "folder/other"), ("file", "file")):
        with pytest.raises(OSError):
            move_where_nothing_is(source, tmp_path / target)
        assert (tmp_path / content).read_text() == "old"
        assert (source / "file").read_text() == "new"


def test_a_fresh_folder_is_on_the_way_to_its_target_and_goes(tmp_path):
    with fresh_folder(tmp_path / "not" / "yet" / "there") as fresh:
        assert fresh.parent == tmp_path
        (fresh / "file").touch()
    assert list(tmp_path.iterdir()) == []
