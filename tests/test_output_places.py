"""Where result files go: links stay links, devices stay devices, and no write leaves anything else behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from longrecall.errors import UserError
from longrecall.files import check_writable, write_text
from longrecall.models.state import RecurrentState


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to(target)
    for text in ("first", "second"):  # nothing there at first
        check_writable(link)
        write_text(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert [entry.name for entry in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("linked", [False, True])
def test_devices_and_pipes_are_not_replaced(tmp_path: Path, linked: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = tmp_path / "link" if linked else pipe
    if linked:
        path.symlink_to(pipe)
    for action in (check_writable, lambda place: write_text(place, "x")):
        with pytest.raises(UserError, match="it is a device or a pipe, no file; choose another --out"):
            action(path)
    assert pipe.is_fifo() and path.is_symlink() == linked


def test_states_are_kept_behind_links_and_not_in_place_of_devices(tmp_path: Path) -> None:
    state = RecurrentState(
        layers=({},), position=torch.zeros(1, dtype=torch.long), length=0
    )  # of a model without layers' states
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "target")
    os.mkfifo(pipe)
    state.save(link, "print")
    assert link.is_symlink() and (tmp_path / "target").is_file()
    with pytest.raises(UserError, match="it is a device or a pipe, no file; choose another place"):
        state.save(pipe, "print")
    assert pipe.is_fifo() and sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "pipe", "target"]


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(UserError, match="its links lead in a circle"):
        write_text(link, "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["link"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "result", "x")
    assert not any(tmp_path.iterdir())


def test_names_that_are_no_utf8_do_not_cost_the_result(tmp_path: Path) -> None:
    write_text(tmp_path / "result", "checkpoint a\udcffb")
    assert (tmp_path / "result").read_text(encoding="utf-8") == "checkpoint a?b"
