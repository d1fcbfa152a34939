"""Runs of `longrecall train` on several processes, some of which die or meet a full disk where a plan says so.

Everything is imported once; every run forks its processes from here. The plan is a list of runs; each gets its exit
codes by rank (-9 = killed, -99 = hung), what each process said, the seconds from the kill, or from the beginning of
training, to the end of the last process, and the moment of a kill at a random time: lines of the log, and whether a
checkpoint was half-written.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longrecall.cli import main as cli
from longrecall.training import evaluation_steps
from longrecall.training import run as training_run
from longrecall.training.checkpoints import saver, shards
from longrecall.training.parallel import agreement
from longrecall.training.trainer import RecurrentTrainer
from tests.processes import meeting_point

PATIENCE = 120.0
"""Seconds after which processes that are still there have hung."""


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_file(tensors: Any, path: Path, **_: Any) -> None:
    path.write_bytes(b"\x08\x00\x00\x00")
    die()


def before(owner: Any, name: str, number: int, action: Callable[..., Any]) -> None:
    """Do something before the call of a function that has this number, from 1."""
    original, calls = getattr(owner, name), iter(range(1, 10_000))

    def counted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            action(*arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, counted)


def interrupt(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def no_memory(*_: Any) -> None:
    raise MemoryError


def no_space(*_: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


TROUBLE: dict[str, Callable[[int], None]] = {
    "load": lambda number: before(training_run, "_job", number, die),
    "step": lambda number: before(RecurrentTrainer, "training_step", number, die),
    "interrupt": lambda number: before(RecurrentTrainer, "training_step", number, interrupt),
    "memory": lambda number: before(RecurrentTrainer, "training_step", number, no_memory),
    "save": lambda number: before(saver.Saver, "save", number, die),
    "shard": lambda number: before(shards, "save_file", number, half_a_file),
    "publish": lambda number: before(saver.Saver, "_publish", number, die),
    "full": lambda number: before(saver.Saver, "_copy", number, no_space),
    "best": lambda number: before(evaluation_steps, "write_model_in_shards", number, no_space),
    "kill best": lambda number: before(evaluation_steps, "write_final", number, die),
}


def child(run: dict[str, Any], rank: int, said: Path) -> int:
    """What one process does; returns its exit code."""
    # Whatever starts the tests in the background has them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run["world"], "LOCAL_WORLD_SIZE": run["world"]}
    if run["world"] > 1:
        os.environ |= {name: str(value) for name, value in ranks.items()}
    kind, number = run.get("trouble", {}).get(str(rank), (None, 0))
    if kind is not None:
        TROUBLE[kind](number)
    return cli.main(["train", *run["words"]])


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def on_processes(run: dict[str, Any]) -> dict[str, Any]:
    """Fork the processes of a run and see how they end."""
    os.chdir(run["folder"])
    said = [Path(f"said-{rank}.txt").resolve() for rank in range(run["world"])]
    children = []
    for path in said:
        path.unlink(missing_ok=True)
    for rank in range(run["world"]):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                code = child(run, rank, said[rank])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    began, codes = time.monotonic(), {}
    began_training: float | None = None
    kill, log = run.get("kill", {"row": 0}), Path(run["output"]) / "log.jsonl"
    killed: float | None = None
    moment: dict[str, Any] = {}
    while len(codes) < len(children):
        now = time.monotonic() - began
        # Who waits for one that died before all had found each other is ended by the launcher, which is not here.
        if began_training is None and "train:" in text_of(said[0]) and text_of(log).count("\n") >= kill["row"]:
            began_training = now
        if "rank" in kill and killed is None and now - (began_training or now) > kill["seconds"]:
            os.kill(children[kill["rank"]], signal.SIGKILL)
            moment = {"lines": text_of(log).count("\n"), "saving": any(log.parent.glob("steps/.*"))}
            killed = now
        for rank, pid in enumerate(children):
            if rank not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(status[1])
                killed = now if codes[rank] == -9 and killed is None else killed
        if now - (killed or 0.0) > PATIENCE:
            for rank, pid in enumerate(children):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[rank] = -99
        time.sleep(0.005)
    ended = time.monotonic() - began
    return {
        "codes": [codes[rank] for rank in range(len(children))],
        "said": [text_of(path) for path in said],
        "seconds": ended - (killed or began_training or 0.0),
        "moment": moment,
    }


def main(name: str) -> None:
    # What people get time for.
    agreement.PATIENCE, cli._AFTER_THE_FIRST, training_run._PATIENCE = 0.3, 0.1, 0.5
    plan = Path(name)
    ends = []
    for planned in json.loads(plan.read_text()):
        # One for each run: what the last one has left there is none of this one's.
        store = meeting_point()
        ends.append(on_processes(planned))
        del store
        plan.with_suffix(".ends").write_text(json.dumps(ends))
