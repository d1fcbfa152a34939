"""Commands that are killed at chosen points, many a second: a warm process forks a child for each.

Importing torch takes seconds, a tiny command a tenth of one. So a server, itself a fork (`warm`), imports what is left
once, runs nothing that starts threads, and forks; `Server` talks to it. A child is killed

* before its n-th operation on files (open for writing, rename, remove, make a folder, ...), as Python's audit events
  report them, or a flush to the disk; or right after it, where it opens a file, which is empty then;
* in the middle of a write: the system lets no file grow beyond some bytes, and ends whoever tries;
* by SIGKILL after some time.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import io
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import longrecall
from tests import warm

CHANGES = {
    "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate",
}  # fmt: skip
"""Audit events of what changes files; ``open`` does when it is for writing."""


@dataclass(frozen=True)
class Kill:
    """When a command is killed.

    Before its operation number `operation` (from 0), or `after` it where it opens a file; when a file would grow beyond
    `size` bytes; or after `seconds`.
    """

    operation: int | None = None
    after: bool = False
    size: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class End:
    """How a command ended: its exit code, None when it was killed; what it did to files; the seconds it took."""

    code: int | None
    operations: list[str]
    seconds: float
    said: str


class Server:
    """The warm process, seen from the tests."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "said.txt"
        with Listener(family="AF_UNIX") as listener:
            self._process = warm.start(serve, listener.address, stderr=self._log)
            self._pipe = listener.accept()

    def run(self, words: Sequence[str], folder: Path, kill: Kill | None = None, patch: str = "") -> End:
        """Run ``longrecall WORDS`` in `folder`; `patch`: name of a function that is called first in the child."""
        request = {"words": list(words), "folder": str(folder), "kill": vars(kill) if kill else None}
        self._pipe.send(request | {"log": str(self._log), "patch": patch})
        answer = self._pipe.recv()
        return End(said=self._log.read_text(errors="replace"), **answer)

    def close(self) -> None:
        """End the server."""
        self._pipe.close()
        self._process.wait(timeout=120)


class _Operations:
    """Counts the operations on files inside a folder and ends this process before a chosen one."""

    def __init__(self, folder: Path, last: int | None, after: bool, report: int) -> None:
        self._folder, self._last, self._report, self._count = os.path.realpath(folder), last, report, 0
        self._process, self._after = os.getpid(), after
        fsync = os.fsync

        def watched(file: Any) -> None:
            self.take("fsync")
            fsync(file)

        os.fsync = watched
        sys.addaudithook(self._hear)
        for module, name in ((io, "open"), (os, "open"), (builtins, "open")):
            setattr(module, name, self._opening(getattr(module, name)))

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*arguments: Any, **options: Any) -> Any:
            before = self._count
            file = original(*arguments, **options)
            if self._after and self._last is not None and before <= self._last < self._count:
                os.kill(os.getpid(), signal.SIGKILL)
            return file

        return opened

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            changes = flags & (os.O_WRONLY | os.O_RDWR) if mode is None else set("wax+") & set(str(mode))
            if changes and self._inside(path):
                self.take("open", path)
        elif event in CHANGES and (self._inside(arguments[0]) or (event == "os.rename" and self._inside(arguments[1]))):
            self.take(event, arguments[0])

    def _inside(self, path: Any) -> bool:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return False
        # A relative name is one in the working folder, or in an open one that is being removed.
        return os.path.join(self._folder, path).startswith(self._folder + os.sep)

    def take(self, what: str, path: Any = "") -> None:
        """Count an operation that is about to be done, or die."""
        if os.getpid() != self._process:  # a child of the command
            return
        if self._count == self._last and not (self._after and what == "open"):
            os.kill(os.getpid(), signal.SIGKILL)
        self._count += 1
        os.write(self._report, f"{what} {os.path.basename(os.fsdecode(path))}\n".encode())


def _child(request: dict[str, Any], report: int) -> int:
    """Do what was asked for in this process, which is not to come back from it."""
    kill = request["kill"] or {}
    log = os.open(request["log"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr, sys.stdin = (open(n, m, closefd=False) for n, m in ((1, "w"), (2, "w"), (0, "r")))  # noqa: SIM115
    os.chdir(request["folder"])
    if request["patch"]:
        globals()[request["patch"]](report)
    if kill.get("size") is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (kill["size"], kill["size"]))
    _Operations(Path(request["folder"]), kill.get("operation"), bool(kill.get("after")), report)
    from longrecall.cli.main import main

    code = main(request["words"])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a child for a request and say how it ended."""
    read, write = os.pipe()
    started = time.perf_counter()
    child = os.fork()
    if not child:
        os.setsid()
        code = 1
        try:
            os.close(read)
            code = _child(request, write)
        finally:
            os._exit(code)
    os.close(write)
    seconds = (request["kill"] or {}).get("seconds")
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    with open(read, "rb") as report:
        operations = report.read().decode(errors="replace").splitlines()
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has started, as when a machine goes down
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    return {"code": code, "operations": operations, "seconds": time.perf_counter() - started}


def quick_demo(report: int) -> None:
    """Make ``longrecall demo`` small, and let it fork the processes that it would start."""
    from longrecall.cli.main import main
    from longrecall.demo import job, processes
    from longrecall.files import write_text
    from longrecall.tasks.text import read_text

    for name, value in {"PAIRS": (1,), "LENGTHS": (64,), "WINDOWS": 1, "KEY_LENGTHS": (128,), "KEYS": 1}.items():
        setattr(job, name, value)
    # To split the shipped texts into tokens takes seconds; a short text of the package will do.
    short = str(resources.files("longrecall") / "assets" / "gla-base" / "README.md")
    job.read_text = lambda _: read_text(short)  # type: ignore[assignment]
    # A page takes seconds to draw; that `report` survives kills is tried on its own.
    job.build_report = lambda results, out, **_: write_text(out, "page")  # type: ignore[assignment, return-value]
    processes.POLL_SECONDS = 0.01

    class Forked:
        """As much of `subprocess.Popen` as the demo uses, in a fork of this process."""

        def __init__(self, command: Sequence[str], stdout: Any, **_: Any) -> None:
            self.code: int | None = None
            self._child = os.fork()
            if not self._child:
                code = 1
                try:
                    os.close(report)
                    for stream in (1, 2):
                        os.dup2(stdout.fileno(), stream)
                    after = command.index("train") if "train" in command else None
                    if after is not None:
                        smaller = ("data.context_length=160", "run.batch_size=1", f"data.sources.0.path={short}")
                        code = main([*command[after:], *(word for what in smaller for word in ("--set", what))])
                    else:
                        sys.argv = ["-c", *command[command.index("-c") + 2 :]]
                        exec(command[command.index("-c") + 1])
                        code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)

        def poll(self) -> int | None:
            if self.code is None:
                done, status = os.waitpid(self._child, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if done else None
            return self.code

        def terminate(self) -> None:
            os.kill(self._child, signal.SIGTERM)

        def wait(self) -> None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])

    # Others use the module too, so it is the demo's own name of it that changes.
    processes.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


def serve(address: str) -> None:
    """Import everything, then answer requests until their end."""
    for module in pkgutil.walk_packages(longrecall.__path__, "longrecall."):
        # Kernels and other people's harness need what may not be installed, and no command here needs them.
        if not module.name.startswith(("longrecall.ops.triton", "longrecall.evaluation.harness")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # what children do not touch need not be copied
    with Client(address) as pipe, contextlib.suppress(EOFError):
        while True:
            pipe.send(_answer(pipe.recv()))
