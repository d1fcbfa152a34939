"""One writer at a time: locks on outputs, which the operating system drops when their holder ends, however it ends.

A lock is `flock` on a small hidden file, so a process that was killed, or a machine that was restarted, leaves none
behind, and a process number that is used again means nothing. On a network file system that passes locks on (NFS does)
it holds between machines too. The file says who holds the lock, for the line that the second writer gets. It is removed
while the lock is held; whoever has opened it meanwhile sees that it no longer has its name, and begins again. (The
library `filelock` leaves its files behind, and does not say who holds them.)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from longrecall.errors import UserError

try:
    import fcntl
except ImportError:  # a system that has no such locks
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".longrecall.lock"
"""Name of the lock file in a folder that is written to; its end, of one beside a file."""

_TAKEN = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_PATIENCE = 1.0
"""Seconds to wait for the holder's name: it is written just after the lock is taken."""
_LONGEST_COMMAND = 120


@dataclass
class _Held:
    """A lock of this process; `depth` blocks of one thread hold it."""

    handle: int
    thread: int
    depth: int = 1


class _Taken(Exception):
    """Another process or thread holds the lock; the words say who."""


_held: dict[Path, _Held] = {}
_guard = threading.Lock()


def lock_file_of(place: Path) -> Path:
    """Return the lock file of a file, or of a folder that is replaced as a whole: hidden, beside it."""
    return place.with_name(f".{place.name}{LOCK_FILE}")


def lock_file_in(folder: Path) -> Path:
    """Return the lock file of a folder that is written to in place.

    It lies inside: the folder above may be forbidden (a mounted volume), and may be another one for another machine.
    """
    return folder / LOCK_FILE


@contextlib.contextmanager
def hold(file: Path, what: str | Path, advice: str) -> Iterator[None]:
    """Hold the lock `file` (an absolute path without links) inside the block; `what` is the output it stands for.

    A thread may hold a lock again that it holds, and a folder's lock holds for all that lies in it, unless somebody
    else holds one there. A child that this process forks does not hold it. Where the file system keeps no locks, a
    warning says so and the work goes on.

    Raises:
        UserError: another process, or thread, holds it; the line names it and ends with `advice`.
        OSError: the lock file cannot be written.
    """
    if _covered(file) and not os.path.lexists(file):
        yield
        return
    try:
        held = _acquire(file)
    except _Taken as taken:
        raise UserError(f"{what} is being written by {taken}; wait until it ends, or {advice}") from None
    try:
        yield
    finally:
        if held:
            _release(file)


def _covered(file: Path) -> bool:
    """Return whether this thread holds the lock of a folder that `file` lies in, other than as its own lock file."""
    with _guard:
        mine = {other for other, held in _held.items() if held.thread == threading.get_ident()}
    return any(folder / LOCK_FILE in mine for folder in file.parents if folder / LOCK_FILE != file)


def _acquire(file: Path) -> bool:
    """Take the lock, or count one more block of this thread; return False where there are no locks."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        with _guard:  # a fork in the middle would leave the child a lock that nothing knows of
            held = _held.get(file)
            if held is not None:
                if held.thread != threading.get_ident():
                    raise _Taken("another thread of this process")
                held.depth += 1
                return True
            try:
                handle = _lock(file)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                with contextlib.suppress(OSError):
                    file.unlink()
                warnings.warn(
                    f"the file system of {file.parent} does not support locks, so two runs could write there at once",
                    stacklevel=5,
                )
                return False
            if handle is not None:
                _held[file] = _Held(handle, threading.get_ident())
                _sign(handle)
                return True
        holder = _holder(file)
        if holder is not None or time.monotonic() > deadline:
            raise _Taken(holder or "another process")
        time.sleep(0.02)  # it has just come, and has not written its name yet, or has just gone


def _lock(file: Path) -> int | None:
    """Return an open handle of the locked file, None when another has it."""
    while True:
        handle, ours = _open(file)
        kept = False
        try:
            if not _flock(handle, file):
                return None
            if not _has_name(handle, file):  # its last holder has removed it since it was opened
                continue
            if ours:
                kept = True
                return handle
            file.unlink()  # what a dead process of another user has left: it cannot take our name
        finally:
            if not kept:
                os.close(handle)


def _flock(handle: int, file: Path) -> bool:
    """Lock an open file and return True, False when another has it."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno == errno.EBADF:  # NFS locks no file that may only be read
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file)) from error
        raise
    return True


def _open(file: Path) -> tuple[int, bool]:
    """Return a handle of the lock file, made if need be, and whether it can be written."""
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666), True
    except PermissionError as refused:
        try:
            return os.open(file, os.O_RDONLY | _NO_LINK), False
        except FileNotFoundError:  # nobody has left a lock: it is the folder that may not be written
            raise refused from None


def _has_name(handle: int, file: Path) -> bool:
    """Return whether the open file is the one that is called `file`; opened anew, since NFS remembers old names."""
    try:
        other = os.open(file, os.O_RDONLY | _NO_LINK)
    except FileNotFoundError:
        return False
    try:
        return os.path.samestat(os.fstat(handle), os.fstat(other))
    finally:
        os.close(other)


def _sign(handle: int) -> None:
    """Write who holds the lock; on a full disk it stays nameless."""
    who = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
    }
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, (json.dumps(who) + "\n").encode("ascii"), 0)
        os.fsync(handle)


def _command() -> str:
    """Return what this process was started as, shortened."""
    program, *words = sys.argv or [""]
    path = Path(program)
    if path.parts[-3:] == ("longrecall", "cli", "main.py"):
        name = "longrecall"
    else:
        name = path.name if path.name not in ("", "-c") else "python"
    text = shlex.join([name, *words])
    return text if len(text) <= _LONGEST_COMMAND else f"{text[: _LONGEST_COMMAND - 3]}..."


def _holder(file: Path) -> str | None:
    """Return who has signed the lock file, None when nobody has (yet, or any more)."""
    try:
        who = json.loads(file.read_text(encoding="ascii"))
        words = f"process {who['pid']} on {who['host']} since {who['since']} ({who['command']})"
        # Anybody may have written the file: nothing in it may steer a terminal.
        return "".join(letter if letter.isprintable() else "?" for letter in words)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _release(file: Path) -> None:
    """Leave one block; after the last one, remove the file and drop the lock."""
    with _guard:
        held = _held.get(file)
        if held is None:  # in a child: the lock is its parent's
            return
        held.depth -= 1
        if held.depth:
            return
        del _held[file]
        with contextlib.suppress(OSError):
            if _has_name(held.handle, file):  # somebody may have removed it by hand, and another taken the place
                file.unlink()
        with contextlib.suppress(OSError):  # at once, even if a forked child still has the handle
            fcntl.flock(held.handle, fcntl.LOCK_UN)
        os.close(held.handle)


def _forget() -> None:
    """In a forked child: the locks are its parent's, and must not outlive it here."""
    for held in _held.values():
        with contextlib.suppress(OSError):
            os.close(held.handle)
    _held.clear()
    _guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget)
