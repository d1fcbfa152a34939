"""Files appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from longrecall.errors import UserError
from longrecall.files import check_no_input, check_writable, make_readable, write_json, write_text


def test_text_replaces_what_was_there_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    for text in ("first ü\n", "second"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [entry.name for entry in path.parent.iterdir()] == ["b.txt"]


def test_files_are_as_readable_as_any_other(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "x")
    (tmp_path / "other").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_mask_and_leave_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    """It is the whole process's: two threads that set and restore it by turns would leave it at 0."""
    before = os.umask(mask)
    try:
        (tmp_path / "private").touch(mode=0o600)
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")
            write_text(tmp_path / "text", "x")
            make_readable(tmp_path / "private")
    finally:
        os.umask(before)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["private", "text"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~mask}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"old": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match=r"^cannot write .*result.json: No space left on device; choose another --x$"):
        write_json(path, {"new": 2}, "choose another --x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    assert '"old"' in path.read_text()


def test_numbers_that_are_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "new" / "x.json")
    assert list((tmp_path / "new").iterdir()) == []
    for path in (tmp_path, tmp_path / "file" / "x.json"):
        for attempt in (check_writable, lambda place: write_text(place, "x")):
            with pytest.raises(UserError, match=r"^cannot write .*; choose another --out$"):
                attempt(path)


def test_what_is_read_is_no_place_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("precious")
    (tmp_path / "link").symlink_to("book.txt")
    (tmp_path / "hard").hardlink_to(tmp_path / "book.txt")
    (tmp_path / "twin").write_text("precious")
    for path in ("book.txt", tmp_path / "book.txt", "./book.txt", "link", "hard"):
        with pytest.raises(UserError, match=r"an input of this command and would be overwritten; choose another --x$"):
            check_no_input(path, [None, "gone", "book.txt"], "choose another --x")
    for path in (None, "twin", "new", tmp_path):
        check_no_input(path, [None, "gone", "book.txt", tmp_path])
