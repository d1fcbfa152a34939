"""Keeping many runs going: side by side on one GPU, in processes on CPUs; a run that fails does not stop the others."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from longrecall.errors import UserError
from longrecall.sweep.examples import Cells
from longrecall.sweep.grid import RunSpec
from longrecall.sweep.training import ModelRun, failed_row

Row = dict[str, Any]
OnRow = Callable[[Row], None]

PAUSE_SECONDS = 2e-4
"""Rest when every run waits for the GPU."""

UNCHECKED_STEPS = 64
"""Steps that a run may be ahead of the GPU: further launches would block the host in the middle of another run's."""


def choose_device(name: str) -> torch.device:
    """Return the device that a recipe names; "auto" is a GPU where there is one. UserError when it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f'run.device "{name}" cannot be used: {str(error).splitlines()[0]}') from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f'run.device "{name}" is neither cpu nor cuda')
    return device


def train_all(
    specs: Sequence[RunSpec], device: torch.device, parallel: int, deadline: float | None, on_row: OnRow
) -> bool:
    """Train every run and hand over its row when it ends, in any order.

    Args:
        specs: the runs; those of one cell should follow each other.
        device: CPU or GPU.
        parallel: how many at once.
        deadline: time (of `time.time`) after which what has not ended is dropped; None = never.
        on_row: called in this process, one row at a time.

    Returns:
        False when the deadline came first.
    """
    if device.type == "cpu" and parallel > 1 and len(specs) > 1:
        return _in_processes(specs, min(parallel, len(specs)), deadline, on_row)
    slots = _Slots(specs, device, parallel if device.type == "cuda" else 1, on_row)
    try:
        while slots.busy:
            if deadline is not None and time.time() > deadline:
                return False
            slots.turn()
    finally:
        slots.close()
    return True


class _Slots:
    """Runs in training, and the queue that refills them; `turn` gives every one of them a step."""

    def __init__(self, specs: Sequence[RunSpec], device: torch.device, parallel: int, on_row: OnRow) -> None:
        self._queue, self._device, self._parallel, self._on_row = deque(specs), device, parallel, on_row
        self._cells = Cells(device)
        self._active: list[tuple[ModelRun, Iterator[bool]]] = []
        self._full = False

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._queue or self._active)

    def turn(self) -> None:
        """Fill the free slots, then move every run on by a step."""
        while self._queue and len(self._active) < self._parallel and not (self._full and self._active):
            self._start(self._queue.popleft())
        moved = False
        for slot in list(self._active):
            run, work = slot
            try:
                moved = next(work) or moved
            except StopIteration:
                self._on_row(run.row())
                self._end(slot)
            except Exception as error:  # whatever broke this run, the others go on
                self._check_device()
                row = failed_row(run.spec, error)
                self._end(slot)
                self._on_row(row)
        if not moved and self._active:
            time.sleep(PAUSE_SECONDS)

    def _start(self, spec: RunSpec) -> None:
        try:
            run = ModelRun(spec, *self._cells.of(spec), self._device)
        except Exception as error:  # the row says what was wrong
            if _out_of_memory(error) and self._active:
                # There is room again when one of the others ends.
                self._queue.appendleft(spec)
                self._full = True
            else:
                self._check_device()
                self._on_row(failed_row(spec, error))
        else:
            self._active.append((run, paced(run)))
            return
        # Outside of the handler: the exception holds what the failed run had allocated.
        self._clean()

    def _end(self, slot: tuple[ModelRun, Iterator[bool]]) -> None:
        self._active.remove(slot)
        slot[0].close()
        self._full = False
        self._clean()

    def _check_device(self) -> None:
        """Raise when the GPU itself is lost (an illegal access ends a process's context): no further run could work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _clean(self) -> None:
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Stop what still runs; its memory is given back."""
        for slot in list(self._active):
            self._end(slot)


def paced(run: ModelRun) -> Iterator[bool]:
    """Yield from the work of `run`, and now and then wait until the GPU has caught up."""
    for steps, moved in enumerate(run.work(), start=1):
        yield moved
        if moved and steps % UNCHECKED_STEPS == 0:
            yield from run.finished()


def _out_of_memory(error: BaseException) -> bool:
    """Whether a full GPU is among the causes: an error while a step is recorded hides the first one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def train_one(spec: RunSpec, deadline: float | None) -> Row | None:
    """Train one run on one CPU thread and return its row, None when the deadline came first."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    return rows[0] if train_all([spec], torch.device("cpu"), 1, deadline, rows.append) else None


def _in_processes(specs: Sequence[RunSpec], workers: int, deadline: float | None, on_row: OnRow) -> bool:
    complete = True
    # Spawned: a fork would copy torch's threads in whatever state they are.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(train_one, spec, deadline): spec for spec in specs}
        try:
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    spec = pending.pop(future)
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        raise UserError(
                            "a training process was killed from outside (is the memory full?); "
                            "go on with --resume and a lower run.parallel"
                        )
                    row = failed_row(spec, error) if error is not None else future.result()
                    complete = complete and row is not None
                    if row is not None:
                        on_row(row)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return complete
