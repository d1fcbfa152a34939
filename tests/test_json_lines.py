"""Files that grow by lines: what a kill leaves is read, what it cut off is written over."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from longrecall.errors import UserError
from longrecall.json_lines import JsonLines, read_json_lines

LINES = [{"n": 1}, {"n": 22}, {"n": 333}]


def written(path: Path) -> bytes:
    file = JsonLines(path, "choose another place")
    file.open(0)
    file.write(LINES)
    file.close()
    return path.read_bytes()


def read(path: Path) -> tuple[list[Any], int]:
    found: list[Any] = []
    whole = read_json_lines(path, lambda number, data: found.append((number, data)))
    return found, whole


def test_lines_come_back_with_their_numbers(tmp_path: Path) -> None:
    whole = written(tmp_path / "a")
    assert read(tmp_path / "a") == (list(enumerate(LINES, start=1)), len(whole))


def test_a_line_is_on_the_disk_when_write_returns(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "a", "")
    file.write(LINES)
    assert not (tmp_path / "a").exists()  # not open yet
    file.open(0)
    file.write(LINES[:1])
    assert json.loads((tmp_path / "a").read_text()) == LINES[0]
    file.close()
    file.write(LINES)
    assert read(tmp_path / "a")[0] == [(1, LINES[0])]


@pytest.mark.parametrize("kept", range(1, len(json.dumps(LINES[-1])) + 1))
def test_what_a_kill_cut_off_is_left_out_and_written_over(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a"
    whole = written(path)
    last = whole.rindex(b"\n", 0, -1) + 1
    path.write_bytes(whole[: last + kept])  # without its newline even a complete line does not count
    found, end = read(path)
    assert (found, end) == (list(enumerate(LINES[:2], start=1)), last)
    file = JsonLines(path, "")
    file.open(end)
    assert path.read_bytes() == whole[:last]
    file.write([{}])
    file.close()
    assert path.read_bytes() == whole[:last] + b"{}\n"


def test_a_damaged_last_line_is_left_out_and_one_before_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    whole = written(path)
    path.write_bytes(whole + b"\x00\x00\x00\n")  # as some file systems fill up after a crash
    assert read(path) == (list(enumerate(LINES, start=1)), len(whole))
    path.write_bytes(whole.replace(b"22", b"2,"))
    with pytest.raises(UserError, match=r"a: line 2 is damaged .*; start over with --force$"):
        read(path)


def test_a_first_line_that_is_refused_is_an_error_even_alone(tmp_path: Path) -> None:
    def refuse(number: int, data: Any) -> None:
        raise ValueError("it is not a journal")

    (tmp_path / "a").write_bytes(b"{}\n")
    with pytest.raises(UserError, match=r"line 1 is damaged \(it is not a journal\)"):
        read_json_lines(tmp_path / "a", refuse)


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^cannot read .*none: "):
        read(tmp_path / "none")
    with pytest.raises(UserError, match=r"^cannot write .*; choose another place$"):
        JsonLines(tmp_path, "choose another place").open(0)


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = JsonLines(tmp_path / "lines", "choose another place")
    file.open(0)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        file.write(LINES)
    assert raised.value.filename == str(tmp_path / "lines") and raised.value.errno == errno.ENOSPC
    file.close()
