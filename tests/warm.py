"""Processes that start at once: a copy of the test process, made before its first test, forks one for each job.

A new Python takes seconds to import torch, transformers and this package. The copy has them, and all test modules, and
has never run anything that starts threads, so what it forks may do all that a new process may. Its processes see no
GPU, and end with the tests. Keep `subprocess` where the start of Python itself is what is tested.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.processes import PATIENCE

_BETWEEN_LOOKS = 0.002
"""Seconds between two looks at a process that is waited for until some time."""


class Process:
    """A process that was started, with the names of `subprocess.Popen`."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self.returncode, self._pipe = pid, None, pipe
        self.returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._ask(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; `subprocess.TimeoutExpired` after `timeout` seconds."""
        code = self._ask(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal; the number of a process that has ended is kept until it is waited for."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with all that it has started."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()

    def _ask(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._pipe.send_bytes(pickle.dumps(("wait", self.pid, timeout)))
            self.returncode = self._pipe.recv()
        return self.returncode


_pipe: Connection | None = None
_copy = 0


def prepare() -> None:
    """Make the copy of this process that forks all others."""
    global _pipe, _copy
    mine, its = Pipe()
    _copy = os.fork()
    if not _copy:
        try:
            _serve(its)
        finally:
            os._exit(0)
    its.close()
    _pipe = mine


def close() -> None:
    """End the copy and what it has started."""
    global _pipe
    if _pipe is not None:
        with contextlib.suppress(BrokenPipeError):
            _pipe.send_bytes(pickle.dumps(("end",)))
        _pipe.close()
        _pipe = None
        os.waitpid(_copy, 0)


def start(
    function: Callable[..., int | None],
    *arguments: Any,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
    stdout: Path | str = os.devnull,
    stderr: Path | str = os.devnull,
) -> Process:
    """Call `function`, which has a name in its module, in a new process; what it returns is the exit code.

    `environment`: variables beside those of this process when it began.
    """
    assert _pipe is not None, "the processes of the tests are forked in pytest alone"
    files = tuple(str(Path(path).absolute()) for path in (stdout, stderr))
    where = str(folder or Path.cwd())
    _pipe.send_bytes(pickle.dumps(("start", pickle.dumps(function), arguments, where, environment or {}, files)))
    answer = _pipe.recv()
    assert isinstance(answer, int), answer
    return Process(answer, _pipe)


def run(function: Callable[..., int | None], *arguments: Any, timeout: float = PATIENCE, **where: Any) -> Any:
    """Do the same and wait for the end; returns what `subprocess.run` does, with all that was said."""
    with tempfile.TemporaryDirectory() as name:
        said = [Path(name) / stream for stream in ("stdout", "stderr")]
        with start(function, *arguments, stdout=said[0], stderr=said[1], **where) as process:
            code = process.wait(timeout)
        texts = [path.read_text(errors="replace") for path in said]
    return subprocess.CompletedProcess([function.__qualname__, *arguments], code, *texts)


def longrecall(words: Sequence[str]) -> int:
    """``longrecall WORDS``, to be run."""
    from longrecall.cli.main import main

    sys.argv = ["longrecall", *words]
    return main(list(words))


def _serve(pipe: Connection) -> None:
    """Answer until the tests end."""
    os.setsid()  # what the keyboard sends to the tests is not for this process
    _let_go(pipe.fileno())
    import torch

    torch.set_num_threads(1)
    # As in any Python: only in pytest are warnings errors.
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    running: set[int] = set()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            what, *request = pickle.loads(pipe.recv_bytes())
            if what == "end":
                break
            pipe.send(_started(running, *request) if what == "start" else _ended(running, *request))
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _let_go(kept: int) -> None:
    """Close the ends of pipes that this process has from the tests: nobody is to wait for it instead of them."""
    for name in os.listdir("/dev/fd"):
        number = int(name)
        with contextlib.suppress(OSError):
            kind = os.fstat(number).st_mode
            if number > 2 and number != kept and (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
                os.close(number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _started(running: set[int], function: bytes, *how: Any) -> int | str:
    try:
        called = pickle.loads(function)  # imports its module here, once for all
    except Exception:
        return traceback.format_exc()
    pid = os.fork()
    if not pid:
        _become(called, *how)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)
    running.add(pid)
    return pid


def _become(
    function: Callable[..., int | None], arguments: Any, folder: str, environment: dict[str, str], files: Sequence[str]
) -> None:
    """Do what was asked for in this process, which does not come back from it."""
    code: int | None = 1
    try:
        os.setpgid(0, 0)
        for stream, file in zip((1, 2), files, strict=True):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666), stream)
        sys.stdin, sys.stdout, sys.stderr = (open(n, m, closefd=False) for n, m in enumerate("rww"))  # noqa: SIM115
        os.chdir(folder)
        os.environ |= environment
        code = function(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int | None) else 1
        if code == 1 and end.code != 1:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


def _ended(running: set[int], pid: int, timeout: float | None) -> int | None:
    """Return how a process has ended, None when it has not after `timeout` seconds."""
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        found, status = os.waitpid(pid, os.WNOHANG if until is not None else 0)
        if found:
            running.discard(pid)
            return os.waitstatus_to_exitcode(status)
        if until is not None and time.monotonic() >= until:
            return None
        time.sleep(_BETWEEN_LOOKS)
