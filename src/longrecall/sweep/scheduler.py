"""Keeping many runs going: side by side on one GPU, in processes on CPUs; a run that fails does not stop the others."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from longrecall.errors import UserError
from longrecall.models.loading import preferred_device
from longrecall.sweep.grid import RunSpec
from longrecall.sweep.slots import OnRow, Slots
from longrecall.sweep.workers import train_in_processes

Row = dict[str, Any]


def choose_device(name: str) -> torch.device:
    """Return the device that a recipe names; "auto" is a GPU where there is one. UserError when it cannot be used."""
    if name == "auto":
        return torch.device(preferred_device())
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f'run.device "{name}" cannot be used: {str(error).splitlines()[0]}') from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f'run.device "{name}" is neither cpu nor cuda')
    return device


def train_all(
    specs: Sequence[RunSpec],
    device: torch.device,
    parallel: int,
    deadline: float | None,
    on_row: OnRow,
    processes: int = 1,
    on_running: OnRow | None = None,
    matmul_precision: str = "highest",
    checkpoints: Path | None = None,
) -> bool:
    """Train every run and hand over its row when it ends, in any order.

    Args:
        specs: the runs, begun in this order; those of one cell should follow each other.
        device: CPU or GPU.
        parallel: how many at once.
        deadline: time (of `time.time`) after which what has not ended is dropped; None = never.
        on_row: called in this process, one row at a time.
        processes: among which they are shared out on a GPU; on CPUs each has its own.
        on_running: called with the row, as far as it goes, of each run that the deadline stopped.
        matmul_precision: of float32 products, as `torch.set_float32_matmul_precision` has it.
        checkpoints: a folder for what the deadline stops, and from which such runs go on.

    Returns:
        False when the deadline came first.

    Raises:
        UserError: a process was killed.
    """
    ended: list[None] = []

    def count(row: Row) -> None:
        ended.append(None)
        on_row(row)

    running = on_running or _ignore
    at_once = min(parallel, len(specs))
    among = min(at_once, processes if device.type == "cuda" else parallel)
    left: Sequence[RunSpec] = specs
    if among > 1:
        parts = shares(at_once, among)
        left = train_in_processes(specs, device, parts, deadline, count, running, matmul_precision, checkpoints)
    # What had no room beside the other processes has the GPU for itself now.
    if left:
        with multiplying(matmul_precision):
            at_once = parallel if device.type == "cuda" else 1
            _in_this_process(left, device, at_once, deadline, count, running, checkpoints)
    return len(ended) == len(specs)


@contextlib.contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Multiply float32 numbers at this precision inside, and as before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def shares(parallel: int, processes: int) -> list[int]:
    """Return how many runs each process has at once, the difference between them at most one."""
    return [parallel // processes + (index < parallel % processes) for index in range(processes)]


def _in_this_process(
    specs: Sequence[RunSpec],
    device: torch.device,
    parallel: int,
    deadline: float | None,
    on_row: OnRow,
    on_running: Callable[[Row], None],
    checkpoints: Path | None,
) -> None:
    queue = deque(specs)
    slots = Slots(lambda: queue.popleft() if queue else None, device, parallel, on_row, checkpoints=checkpoints)
    try:
        slots.work(deadline)
        for row in slots.running():
            on_running(row)
    finally:
        slots.close()


def _ignore(row: Row) -> None:
    """Drop a row."""
