"""The work of an engine between two looks at its queue: read a segment of prompts, decode a token of every slot.

One thread owns it, and the model with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from longrecall.inference.slots import Slots, make_slots, slot_room
from longrecall.inference.to_device import to_device
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.serving.prefixes import Prefixes
from longrecall.serving.reading import Job, PromptReader, Ready
from longrecall.serving.request import LENGTH, NoNumbers, TokenLogprobs
from longrecall.serving.sampling import NOT_FINITE, Chooser, Chosen

LAGGING = ("cuda",)
"""Devices that work on the next token while the one before is told; on a CPU both are the same processor's work."""

FIRST_ROOM = 256
"""Tokens of a sequence that slots have room for at first, in models whose caches grow."""

GATHERED = 16
"""Where requests wait for slots, free ones are filled when they are one of so many, and at least two of eight or more:
reading one prompt takes about as long as reading a few."""

LONGEST_GATHERING = 32
"""Steps after which free slots are filled even so."""

SETTLED = 4
"""Steps in which fewer rows would do, after which sequences move to the first rows."""

NO_NUMBERS = (
    "the model's logits became NaN or infinite, so it cannot choose a next token. longrecall diagnose CKPT --text "
    "FILE says which layer breaks, and where"
)


@dataclass(frozen=True)
class _Outcome:
    """Tokens that were chosen and not yet told: whose they are, row by row."""

    rows: list[tuple[int, Job]]
    chosen: Chosen
    told: Tensor
    arrived: torch.cuda.Event | None


class Worker:
    """Jobs in slots. Those of the reader, and those that are `ready`, have a slot to come.

    A GPU reads prompts while it decodes for others: a group of them at a time, which is `ready` and has arrived some
    steps later.
    """

    def __init__(self, model: RecurrentLM, slots: int, segment: int, prefix_bytes: int) -> None:
        self.model, self.slots, self.device = model, slots, model.device
        self.reader = PromptReader(model, segment, Prefixes(prefix_bytes))
        self.rows: list[Job | None] = [None] * slots
        self.step: Slots | None = None
        self.chooser: Chooser | None = None
        self.pending: deque[_Outcome] = deque()
        self.ready: Ready | None = None
        self.lags = self.device.type in LAGGING
        self.gathering, self.narrower = 0, 0

    def prepare(self) -> None:
        """Capture or record steps, and segments of prompts, before the first request comes."""
        self._step_for(FIRST_ROOM)
        self.reader.prepare(self.slots)

    @property
    def free(self) -> int:
        """Slots that nobody has or is about to have."""
        return self.slots - self.taken

    @property
    def taken(self) -> int:
        """Slots that somebody has or is about to have."""
        ready = self.ready  # other threads ask, too
        return self.running + len(self.reader.waiting) + (0 if ready is None else len(ready.jobs))

    @property
    def running(self) -> int:
        """Slots in use."""
        return sum(job is not None for job in self.rows)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.reader.waiting or self.ready or self.running or self.pending)

    def takes(self, waiting: int) -> int:
        """How many of so many requests that wait are to be added before the next step.

        Requests for which there are slots are taken at once. Where there are too few, free slots gather.
        """
        free = self.free
        scarce = self.running and waiting > free > 0
        self.gathering = self.gathering + 1 if scarce else 0
        if (
            scarce
            and free < max(self.slots // GATHERED, min(2, self.slots // 4))
            and self.gathering <= LONGEST_GATHERING
        ):
            return 0
        self.gathering = 0
        return min(free, waiting)

    def add(self, job: Job) -> None:
        """Take a job; there must be a free slot."""
        self.reader.add(job)

    def drop_ended(self) -> None:
        """Give up jobs whose requests have ended or were cancelled: their slots are free."""
        if any(job.request.done for job in self.reader.waiting):
            self.reader.waiting = [job for job in self.reader.waiting if not job.request.done]
        for row, job in enumerate(self.rows):
            if job is not None and job.request.done:
                self._leave(row)

    def work(self) -> None:
        """Read one segment of prompts, if any wait, and decode one token of every slot in use."""
        self._read()
        if self.running or self.pending:
            try:
                self._decode()
            except Exception as error:
                told = [job for outcome in self.pending for _, job in outcome.rows]
                self.pending.clear()
                self._fail([*told, *(job for job in self.rows if job is not None)], error)

    def _read(self) -> None:
        if self.ready is not None and (self.ready.arrived or not self.running):
            ready, self.ready = self.ready, None
            self._begin_or_fail(ready)
        if self.ready is not None or not self.reader.waiting:
            return
        groups = self.reader.groups()
        # Where most slots are free, a step is little work and those who come are many: all are read at once.
        beside = len(groups) == 1 or 2 * self.running >= self.slots
        for group in groups:
            jobs = [job for job in group if not job.request.done]
            if not jobs:
                continue
            try:
                ready = self.reader.read(jobs)
            except Exception as error:
                self._fail(jobs, error)
                continue
            if beside and self.running and ready.arrival is not None:
                self.ready = ready
                return
            self._begin_or_fail(ready)

    def _begin_or_fail(self, ready: Ready) -> None:
        try:
            ready.wait()
            if ready.jobs:
                self._begin(ready)
        except Exception as error:
            self._fail(ready.jobs, error)

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
            job.request.fail(error)
        # Without the traceback, which would hold the tensors of the step that failed.
        error.__traceback__ = None
        self.drop_ended()

    def _begin(self, ready: Ready) -> None:
        """The first token of these jobs, and a slot for each that goes on."""
        chosen = Chooser([job.sampling for job in ready.jobs], self.device)(ready.logits)
        rows = list(enumerate(ready.jobs))
        for row, job in rows:
            job.launched = 1
            if job.wants_state:
                job.request.state = job.own_state(ready.state, row)
        self.pending.append(_Outcome(rows, chosen, *self._sent(chosen.told)))
        if not self.lags:
            self._tell_first()
        stays = [(row, job) for row, job in rows if not (job.request.done or job.has_all)]
        if not stays:
            return
        index = to_device([row for row, _ in stays], self.device)
        whole = len(stays) == len(rows)
        state = ready.state if whole else ready.state.select_rows(index)
        step = self._step_for(max(job.room for _, job in stays))
        free = [row for row, job in enumerate(self.rows) if job is None][: len(stays)]
        step.join(free, state)
        step.ids.index_copy_(0, to_device(free, self.device), chosen.tokens.index_select(0, index))
        for row, (_, job) in zip(free, stays, strict=True):
            self.rows[row] = job
        self.chooser = None

    def _step_for(self, room: int) -> Slots:
        """The step, with room for sequences of so many tokens where caches grow."""
        old = self.step
        if old is None or (old.room and room > old.room):
            room = 0 if self.reader.fixed else slot_room(room)
            new = make_slots(self.model, self.slots, room)
            rows = [row for row, job in enumerate(self.rows) if job is not None]
            if old is not None and rows:
                new.join(rows, old.take(rows))
                new.ids.copy_(old.ids)
            self.step = new
        assert self.step is not None
        return self.step

    def _decode(self) -> None:
        """Launch the next tokens, and tell those that were launched before."""
        count = len(self.pending)
        if self.running:
            self._launch()
        if not self.lags:
            count = len(self.pending)
        for _ in range(count):
            self._tell_first()

    def _launch(self) -> None:
        assert self.step is not None
        self._gather()
        present = [(row, job) for row, job in enumerate(self.rows) if job is not None]
        top = present[-1][0] + 1
        if self.chooser is None or self.chooser.size > self.step.count_for(top):
            self.chooser = Chooser([None if job is None else job.sampling for job in self.rows[:top]], self.device)
        chosen = self.chooser(self.step.decode(top))
        self.step.ids[: len(chosen.tokens)].copy_(chosen.tokens)
        self.pending.append(_Outcome(present, chosen, *self._sent(chosen.told)))
        for row, job in present:
            job.launched += 1
            if job.has_all:
                self._leave(row)

    def _sent(self, told: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Tokens on their way to the CPU, and what tells that they are there."""
        if self.device.type != "cuda":
            return told, None
        here = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
        here.copy_(told, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return here, event

    def _gather(self) -> None:
        """Move the last sequences to free slots before them, where fewer rows have been enough for some steps."""
        assert self.step is not None
        present = [row for row, job in enumerate(self.rows) if job is not None]
        count = self.step.count_for(len(present))
        last = [row for row in present if row >= count]
        self.narrower = self.narrower + 1 if last else 0
        if self.narrower <= SETTLED:
            return
        self.narrower = 0
        free = [row for row, job in enumerate(self.rows) if job is None][: len(last)]
        self.step.move(last, free)
        for row, to in zip(last, free, strict=True):
            self.rows[to], self.rows[row] = self.rows[row], None
        self.chooser = None

    def _leave(self, row: int) -> None:
        self.rows[row] = None
        if not self.running:
            self.chooser = None

    def _tell_first(self) -> None:
        self._tell(self.pending[0])
        self.pending.popleft()

    def _tell(self, outcome: _Outcome) -> None:
        if outcome.arrived is not None:
            outcome.arrived.synchronize()
        tokens, logprobs = outcome.told.tolist(), _logprobs(outcome.chosen)
        for row, job in outcome.rows:
            request, token = job.request, tokens[row]
            if token == NOT_FINITE:
                request.fail(NoNumbers(NO_NUMBERS))
            elif job.wants_state:
                request.finish(LENGTH)
            elif not request.done:
                told = logprobs.get(row)
                if told is not None:
                    told = TokenLogprobs(told.logprob, told.top[: request.options.logprobs])
                request.add(token, told)


def _logprobs(chosen: Chosen) -> dict[int, TokenLogprobs]:
    """By row: what was asked for."""
    if chosen.logprobs is None:
        return {}
    own = chosen.logprobs.tolist()
    top: list[tuple[tuple[int, float], ...]] = [()] * len(own)
    if chosen.top is not None:
        values, ids = chosen.top[0].tolist(), chosen.top[1].tolist()
        top = [tuple(zip(places, found, strict=True)) for places, found in zip(ids, values, strict=True)]
    return {row: TokenLogprobs(own[i], top[i]) for i, row in enumerate(chosen.told_rows)}
