"""Runs in processes that train one after the other: on CPUs, and on a GPU where one process is not enough for it.

A process that records a step keeps its other runs waiting, and its own launches come one after the other. Several
processes record while the others train. Without CUDA's multi-process service they take turns on the GPU, with it their
kernels run at the same time.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from longrecall.errors import UserError
from longrecall.sweep.grid import RunSpec
from longrecall.sweep.slots import OnRow, Slots

ROW, RUNNING, NO_ROOM, REFUSED = "row", "running", "no room", "refused"


def train_in_processes(
    specs: Sequence[RunSpec],
    device: torch.device,
    shares: Sequence[int],
    deadline: float | None,
    on_row: OnRow,
    on_running: OnRow,
    matmul_precision: str = "highest",
    checkpoints: Path | None = None,
) -> list[RunSpec]:
    """Train the runs in their order, the next one wherever a slot is free; see `scheduler.train_all`.

    Args:
        shares: runs at once in each of the processes.

    Returns:
        The runs for which there was no memory while others had it.

    Raises:
        UserError: a process was killed, or lost its GPU; a checkpoint cannot be written.
    """
    # Spawned: a fork would copy torch's threads in whatever state they are, and CUDA does not survive it.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    workers: dict[Connection, Any] = {}
    no_room: list[RunSpec] = []
    refused: list[str] = []
    # A KeyError here would be a message of another version: both ends are this file.
    take: dict[str, Callable[[Any], None]] = {
        ROW: on_row,
        RUNNING: on_running,
        NO_ROOM: lambda index: no_room.append(specs[index]),
        REFUSED: refused.append,
    }
    try:
        for share in shares:
            ours, theirs = context.Pipe(duplex=False)
            shared = (list(specs), device.type, device.index, share, deadline, matmul_precision, checkpoints)
            workers[ours] = context.Process(target=_worker, args=(*shared, counter, theirs), daemon=True)
            workers[ours].start()
            theirs.close()  # so that its end shows here
        open_ends = list(workers)
        while open_ends:
            for end in wait(open_ends):
                assert isinstance(end, Connection)
                try:
                    kind, content = end.recv()
                except EOFError:
                    open_ends.remove(end)
                    _check_end(workers[end])
                else:
                    take[kind](content)
        # Not before all have ended: the others write checkpoints meanwhile.
        if refused:
            raise UserError(refused[0])
    finally:
        for worker in workers.values():
            if worker.is_alive():
                worker.terminate()
            worker.join()
    return no_room


def _check_end(worker: Any) -> None:
    worker.join()
    if worker.exitcode:
        raise UserError(
            f"a training process ended with exit code {worker.exitcode}; the memory may be full, or its GPU was "
            "lost. Continue with --resume and a lower run.parallel"
        )


def _worker(
    specs: list[RunSpec],
    kind: str,
    index: int | None,
    parallel: int,
    deadline: float | None,
    matmul_precision: str,
    checkpoints: Path | None,
    counter: Any,
    results: Connection,
) -> None:
    """Train runs until none is left; `counter` is the place of the next one that nobody has taken."""
    # Ctrl-C reaches every process of a terminal: the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(matmul_precision)
    places = {spec.key: place for place, spec in enumerate(specs)}

    def take() -> RunSpec | None:
        with counter.get_lock():
            place = counter.value
            counter.value = place + 1
        return specs[place] if place < len(specs) else None

    slots = Slots(
        take,
        torch.device(kind) if index is None else torch.device(kind, index),
        parallel,
        lambda row: results.send((ROW, row)),
        lambda spec: results.send((NO_ROOM, places[spec.key])),
        checkpoints,
    )
    try:
        slots.work(deadline)
        for row in slots.running():
            results.send((RUNNING, row))
    except UserError as error:
        results.send((REFUSED, str(error)))
    finally:
        slots.close()
        results.close()
