"""Where results go: not through links, not over devices, not over what is there; and nothing else is left behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from longrecall.errors import UserError
from longrecall.files import check_writable, write_text
from longrecall.locks import LOCK_FILE
from longrecall.models.state import RecurrentState
from longrecall.outputs import claim_file, claim_folder, claim_new_folder, refuse_busy


@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_written_through_a_link(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to(target)
    if there:
        target.parent.mkdir()
        target.write_text("precious")
    reason = "results are not written through links; name .*target itself" if there else "which is not there"
    for action in (check_writable, lambda place: write_text(place, "x")):
        with pytest.raises(UserError, match=reason):
            action(link)
    assert link.is_symlink() and target.parent.exists() == there
    assert not there or target.read_text() == "precious"


def test_a_link_to_a_folder_on_the_way_is_as_good_as_the_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    write_text(tmp_path / "link" / "result", "x")
    assert (tmp_path / "folder" / "result").read_text() == "x"
    (tmp_path / "lost").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"cannot write .*result: .*lost is a link to .*nowhere, which is not there;"):
        write_text(tmp_path / "lost" / "result", "x")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("linked", [False, True])
def test_devices_and_pipes_are_not_replaced(tmp_path: Path, linked: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = tmp_path / "link" if linked else pipe
    if linked:
        path.symlink_to(pipe)
    for action in (check_writable, lambda place: write_text(place, "x")):
        with pytest.raises(UserError, match="it is a device or a pipe, not a file; choose another --out"):
            action(path)
    assert pipe.is_fifo() and path.is_symlink() == linked


def test_the_output_of_the_process_is_no_file(tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(UserError, match="it is a device or a pipe, not a file"):
            check_writable(f"/dev/fd/{write}")
    finally:
        os.close(read)
        os.close(write)
    with (tmp_path / "file").open("w") as file, pytest.raises(UserError, match="results are not written through"):
        check_writable(f"/dev/fd/{file.fileno()}")


def test_states_take_the_place_of_no_link_and_no_device(tmp_path: Path) -> None:
    state = RecurrentState(
        layers=({},), position=torch.zeros(1, dtype=torch.long), length=0
    )  # of a model without layers' states
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    state.save(tmp_path / "target", "print")
    link.symlink_to(tmp_path / "target")
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="it is a link, and results are not written through links"):
        state.save(link, "print")
    with pytest.raises(UserError, match="it is a device or a pipe, not a file; choose another place"):
        state.save(pipe, "print")
    assert pipe.is_fifo() and sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "pipe", "target"]


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(UserError, match="its symbolic links form a circle"):
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


def checkpoint_at(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("resume", [None, False])
def test_what_is_there_is_replaced_with_force_only(tmp_path: Path, resume: bool | None) -> None:
    path = tmp_path / "out.json"
    path.write_text("precious")
    words = "--resume keeps it and does what is missing, --force" if resume is False else "--force"
    with pytest.raises(UserError, match=rf"out.json exists already; {words} replaces it, or choose another --out$"):
        claim_file(path, resume=resume).__enter__()
    with claim_file(path, force=True, resume=resume):
        assert path.read_text() == "precious" and len(list(tmp_path.iterdir())) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_unfinished_work_is_kept_until_it_is_resumed_or_given_up(tmp_path: Path) -> None:
    path, journal = tmp_path / "out.json", tmp_path / "out.json.partial.1"
    journal.write_text("work")
    with claim_file(path):  # of a verb that cannot resume, and has no journals
        pass
    with pytest.raises(UserError, match=r"out.json.partial.1 holds .* --resume continues it, --force starts over"):
        claim_file(path, resume=False).__enter__()
    for allowed in ({"resume": True}, {"resume": False, "force": True}):
        with claim_file(path, **allowed):
            assert journal.read_text() == "work"
    with pytest.raises(UserError, match="give one of them"):
        claim_file(path, resume=True, force=True).__enter__()


def test_no_output_lies_in_a_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint_at(tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    words = "lies inside the checkpoint folder .*model, which may hold nothing else; choose another --out$"
    for inside in (folder / "out", folder / "a" / "out", tmp_path / "link" / "out"):
        for claim in (claim_file, claim_folder, claim_new_folder):
            with pytest.raises(UserError, match=words):
                claim(inside, advice="choose another --out").__enter__()  # type: ignore[operator]
    with pytest.raises(UserError, match=words):
        claim_folder(folder, "choose another --out").__enter__()
    with claim_new_folder(folder, "advice") as place:  # as a whole it may be replaced
        assert place == folder
    (folder / "config.json").unlink()
    with claim_file(folder / "out"):
        pass
    assert sorted(entry.name for entry in folder.iterdir()) == ["model-00001-of-00002.safetensors"]


def test_the_remains_of_killed_writers_go_when_the_next_one_comes(tmp_path: Path) -> None:
    remains, others = tmp_path / ".out.json.0123456789abcdef.tmp", tmp_path / ".other.json.0123456789abcdef.tmp"
    folder = tmp_path / ".out.json.abcdef0123456789.tmp"
    folder.mkdir()
    for path in (remains, folder / "out.json", others):
        path.touch()
    with claim_file(tmp_path / "out.json"):
        assert not remains.exists() and not folder.exists() and others.exists()


def test_a_folder_behind_a_link_is_written_in_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "lost").symlink_to("nowhere")
    with claim_folder(tmp_path / "link", "advice"):
        assert list((tmp_path / "folder").iterdir())
    assert not list((tmp_path / "folder").iterdir())
    for claim, name in ((claim_new_folder, "link"), (claim_folder, "lost"), (claim_new_folder, "lost")):
        with pytest.raises((UserError, OSError), match=r"(it|lost) is a link"):
            claim(tmp_path / name, "advice").__enter__()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "link", "lost"]


def test_a_folder_that_is_written_in_is_replaced_by_nobody(tmp_path: Path) -> None:
    told: list[str] = []

    def ask() -> None:  # another thread is as good as another process
        try:
            refuse_busy(tmp_path, "choose another folder")
        except UserError as error:
            told.append(str(error))

    with claim_folder(tmp_path, "advice"):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert "is being written by another thread" in told[0]
    (tmp_path / LOCK_FILE).touch()
    refuse_busy(tmp_path, "advice")
    assert not list(tmp_path.iterdir())
