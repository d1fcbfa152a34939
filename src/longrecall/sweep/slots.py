"""Several runs side by side in one process: each on a stream of its own, refilled from a queue, moved on in turns."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
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

STEPS_AHEAD = 8
"""Steps that a run may be ahead of the GPU. Who records a step first waits for all that its process has enqueued, and
so does who stops: a long queue would keep the host waiting."""


class Slots:
    """Runs in training, and where the next ones come from; `turn` gives every one of them a step.

    Args:
        take: returns the next run, None when there is no more.
        device: where all of them train.
        parallel: how many at once.
        on_row: gets the row of every run that has ended.
        no_room: gets a run for which the memory was too small although nothing else trains here; without it such a run
            has failed.
        checkpoints: a folder, which is there, in which `running` leaves what is in training, and from which it goes on.
    """

    def __init__(
        self,
        take: Callable[[], RunSpec | None],
        device: torch.device,
        parallel: int,
        on_row: OnRow,
        no_room: Callable[[RunSpec], None] | None = None,
        checkpoints: Path | None = None,
    ) -> None:
        self._take, self._device, self._parallel = take, device, parallel
        self._checkpoints = checkpoints
        self._on_row, self._no_room = on_row, no_room
        self._cells = Cells(device)
        self._active: list[tuple[ModelRun, Iterator[bool]]] = []
        self._waiting: RunSpec | None = None
        self._full = self._dry = False

    @property
    def busy(self) -> bool:
        """Whether anything may be left to do."""
        return bool(self._active or self._waiting or not self._dry)

    def work(self, deadline: float | None) -> None:
        """Train until there is nothing left, or until `deadline` (of `time.time`); None = to the end."""
        while self.busy and (deadline is None or time.time() <= deadline):
            self.turn()

    def turn(self) -> None:
        """Fill the free slots, then move every run on by a step."""
        while len(self._active) < self._parallel and not (self._full and self._active):
            spec = self._next()
            if spec is None:
                break
            self._start(spec)
        moved = False
        for slot in list(self._active):
            run, work = slot
            try:
                moved = next(work) or moved
            except StopIteration:
                self._finish(slot)
            except Exception as error:  # whatever broke this run, the others go on
                self._check_device()
                row = failed_row(run.spec, error)
                self._end(slot)
                self._on_row(row)
        if not moved and self._active:
            time.sleep(PAUSE_SECONDS)

    def running(self) -> list[Row]:
        """Return the rows, as they are by now, of the runs that are in training, and write their checkpoints.

        Raises:
            UserError: a checkpoint cannot be written; those of the other runs are there.
        """
        refused: list[UserError] = []
        for slot in list(self._active) if self._checkpoints is not None else ():
            try:
                self._park(slot)
            except UserError as error:
                refused.append(error)
        if refused:
            raise refused[0]
        return [run.row() for run, _ in self._active]

    def _park(self, slot: tuple[ModelRun, Iterator[bool]]) -> None:
        """Write the checkpoint of a run; one whose last evaluation was under way has ended instead."""
        run, work = slot
        run.stopping = True
        try:
            while run.evaluating:
                next(work)
        except StopIteration:
            self._finish(slot)
        else:
            assert self._checkpoints is not None
            run.save(checkpoint_of(run.spec, self._checkpoints))

    def _finish(self, slot: tuple[ModelRun, Iterator[bool]]) -> None:
        run = slot[0]
        self._on_row(run.row())
        self._end(slot)
        if self._checkpoints is not None:
            checkpoint_of(run.spec, self._checkpoints).unlink(missing_ok=True)

    def _next(self) -> RunSpec | None:
        spec, self._waiting = self._waiting, None
        if spec is None and not self._dry:
            spec = self._take()
            self._dry = spec is None
        return spec

    def _start(self, spec: RunSpec) -> None:
        try:
            run = ModelRun(spec, *self._cells.of(spec), self._device)
            if self._checkpoints is not None and (path := checkpoint_of(spec, self._checkpoints)).exists():
                run.load(path)
        except Exception as error:  # the row says what was wrong
            if _out_of_memory(error) and self._active:
                # There is room again when one of the others ends.
                self._waiting = spec
                self._full = True
            elif _out_of_memory(error) and self._no_room is not None:
                self._no_room(spec)
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


def checkpoint_of(spec: RunSpec, folder: Path) -> Path:
    """Return where a run that was stopped is kept."""
    return folder / f"{spec.key[:16]}.pt"


def paced(run: ModelRun) -> Iterator[bool]:
    """Yield from the work of `run`, never more than `STEPS_AHEAD` steps before the GPU."""
    ahead: deque[torch.cuda.Event | None] = deque()
    for moved in run.work():
        yield moved
        if moved:
            ahead.append(run.mark())
            if len(ahead) > STEPS_AHEAD:
                yield from run.reached(ahead.popleft())


def _out_of_memory(error: BaseException) -> bool:
    """Whether a full GPU is among the causes: an error while a step is recorded hides the first one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
