"""One writer at a time: real processes, killed ones too."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from longrecall import locks
from longrecall.errors import UserError
from longrecall.locks import LOCK_FILE, hold, lock_file_in, lock_file_of

HOLDER = """
import os, sys, time
from pathlib import Path
from longrecall.locks import hold
with hold(Path(sys.argv[1]), "output", "advice"):
    child = os.fork() if sys.argv[2] == "fork" else None
    if child == 0:
        time.sleep(60)
    print(child, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(file: Path, kind: str = "alone") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a process that holds the lock; gives it, and the number of its child."""
    command = [sys.executable, "-c", HOLDER, str(file), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder without a name is waited for only shortly."""
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)


def refusal(file: Path) -> str:
    with pytest.raises(UserError) as caught, hold(file, "out.json", "choose another --out"):
        pass
    return str(caught.value)


def test_the_second_process_is_told_who_the_first_one_is(tmp_path: Path) -> None:
    file = lock_file_of(tmp_path / "out.json")
    with holder(file) as (process, _):
        told = refusal(file)
        assert told.startswith(f"out.json is being written by process {process.pid} on {socket.gethostname()} since 20")
        assert told.endswith(f"(python {file} alone); wait until it ends, or choose another --out")
        process.communicate("")
    with hold(file, "out.json", "advice"):
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_a_killed_holder_blocks_nobody_even_if_its_child_lives_on(tmp_path: Path) -> None:
    file = lock_file_in(tmp_path)
    with holder(file, "fork") as (process, child):
        try:
            refusal(file)
            process.send_signal(signal.SIGKILL)
            process.wait()
            os.kill(int(child), 0)  # still there
            assert file.exists()
            # On a busy machine the child may not have run since it was forked: it drops the lock as soon as it does.
            deadline = time.monotonic() + 120
            while True:
                try:
                    with hold(file, "out", "advice"):
                        break
                except UserError:
                    assert time.monotonic() < deadline, "the child keeps its parent's lock"
                    time.sleep(0.05)
        finally:
            os.kill(int(child), signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def test_numbers_of_processes_that_are_used_again_mean_nothing(tmp_path: Path) -> None:
    file = lock_file_in(tmp_path)
    for remains in ("", "{", json.dumps({"pid": os.getppid(), "host": socket.gethostname()})):
        file.write_text(remains)
        with hold(file, "out", "advice"):
            pass
        assert not file.exists()


def test_a_thread_may_hold_its_lock_again_and_another_may_not(tmp_path: Path) -> None:
    file = lock_file_of(tmp_path / "x")
    told: list[str] = []
    with hold(file, "x", "advice"):
        with hold(file, "x", "advice"):
            pass
        assert file.exists()
        thread = threading.Thread(target=lambda: told.append(refusal(file)))
        thread.start()
        thread.join()
    assert "another thread of this process" in told[0]
    assert not file.exists()


def test_the_lock_of_a_folder_holds_for_what_lies_in_it(tmp_path: Path) -> None:
    with hold(lock_file_in(tmp_path), tmp_path, "advice"):
        for inner in (lock_file_of(tmp_path / "x"), lock_file_in(tmp_path / "not" / "there")):
            with hold(inner, "x", "advice"):
                assert [entry.name for entry in tmp_path.iterdir()] == [LOCK_FILE]
        inner = lock_file_of(tmp_path / "x")
        with inner.open("w") as other:  # but not for what somebody else has locked before
            fcntl.flock(other, fcntl.LOCK_EX)
            assert "another process" in refusal(inner)
        with hold(inner, "x", "advice"):
            pass
        assert [entry.name for entry in tmp_path.iterdir()] == [LOCK_FILE]
    assert not list(tmp_path.iterdir())


WORKER = """
import sys, time
from pathlib import Path
from longrecall import locks
from longrecall.errors import UserError
from longrecall.locks import hold
file, counter = Path(sys.argv[1]), Path(sys.argv[2])
mine, end = 0, time.monotonic() + 0.7
while time.monotonic() < end:
    try:
        with hold(file, "x", "advice"):
            before = int(counter.read_text())
            counter.write_text(str(before + 1))
            mine += 1
    except UserError:
        pass
print(mine)
"""


def test_removing_the_file_lets_no_two_in(tmp_path: Path) -> None:
    """Three processes count in one file without any other care; a count that is lost shows two at once."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    command = [sys.executable, "-c", WORKER, str(lock_file_of(counter)), str(counter)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = [int(worker.communicate()[0]) for worker in workers]
    assert sum(count > 0 for count in counts) > 1 and sum(counts) == int(counter.read_text())


def test_a_file_of_another_user_that_nobody_holds_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = lock_file_in(tmp_path)
    file.write_text("theirs")
    real: Callable[..., int] = os.open

    def forbidden(path: str | Path, flags: int, *rest: int) -> int:
        if flags & os.O_RDWR and file.exists() and file.read_text() == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", forbidden)
    other = real(file, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert "by another process; wait" in refusal(file)
    os.close(other)
    with hold(file, "x", "advice"):
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_a_folder_that_may_not_be_written_is_said_to_be_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., int] = os.open

    def forbidden(path: str | Path, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(PermissionError), hold(lock_file_of(tmp_path / "out.json"), "x", "advice"):
        pass


def test_a_file_system_without_locks_is_said_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="does not support locks"), hold(lock_file_in(tmp_path), "x", "advice"):
        assert not list(tmp_path.iterdir())


def test_links_in_the_place_of_a_lock_file_are_not_followed(tmp_path: Path) -> None:
    lock_file_in(tmp_path).symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("x")
    with pytest.raises(OSError), hold(lock_file_in(tmp_path), "x", "advice"):
        pass
    assert (tmp_path / "precious").read_text() == "x"


def test_what_a_lock_file_says_steers_no_terminal(tmp_path: Path) -> None:
    file = lock_file_in(tmp_path)
    who = {"pid": 1, "host": "h", "since": "s", "command": "\x1b[2J"}
    with file.open("w") as other:
        json.dump(who, other)
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "\x1b" not in refusal(file) and "(?[2J)" in refusal(file)
