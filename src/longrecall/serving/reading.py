"""Reading prompts for an engine: a segment at a time, several prompts side by side, from states that are known."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from longrecall.errors import first_line
from longrecall.inference.eligibility import why_no_graph, why_not_fixed
from longrecall.inference.prompt_batches import PromptBatches
from longrecall.inference.reading import captured_segments, read_prompt
from longrecall.inference.to_device import to_device
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.serving.prefixes import Prefixes
from longrecall.serving.request import Request
from longrecall.serving.sampling import Sampling

MOST_ROWS = 64
"""Prompts that are read side by side at most, where no segments were captured for them."""

WORTH_A_PASS = 8
"""So many prompts with caches side by side take a GPU as long as one after the other in captured segments, about."""

SHORT = 64
"""Tokens up to which prompts take about the same time, however different their lengths are."""

SHARE_OF_SLOTS = 4
"""Captured segments have a row for one slot in so many at most: their rows have states, too."""


@dataclass(eq=False)
class Job:
    """A request inside the engine: how much of its prompt is read, and what of its answer is under way."""

    request: Request
    sampling: Sampling
    start: RecurrentState | None = None
    """What is read before the prompt ``[1]``."""
    start_name: str = ""
    wants_state: bool = False
    read: int = 0
    state: RecurrentState | None = None
    """After the tokens of the prompt that are read ``[1]``; None = at the start, with nothing read before."""
    stops: dict[int, bytes] = field(default_factory=dict)
    """Where a state is to be kept for other prompts, under which name."""
    launched: int = 0
    """Tokens that were chosen, or are being chosen."""

    before: int = 0
    """Tokens that come before the prompt."""
    room: int = 0
    """Tokens of the whole sequence at most."""

    def __post_init__(self) -> None:
        self.before = 0 if self.start is None else self.start.length
        self.room = self.before + len(self.request.prompt) + self.request.options.max_new_tokens

    def own_state(self, states: RecurrentState, row: int) -> RecurrentState:
        """A copy of its row, after the tokens that are read: as if it had been read alone."""
        own = states.select_rows(to_device([row], states.position.device))
        return replace(own, length=self.before + self.read)

    @property
    def has_all(self) -> bool:
        """Whether all its tokens are chosen, or being chosen."""
        return self.wants_state or self.launched == self.request.options.max_new_tokens

    def next_end(self, segment: int) -> int:
        """How far the prompt is read next."""
        end = min(self.read + segment, len(self.request.prompt))
        return next((stop for stop in sorted(self.stops) if self.read < stop < end), end)


@dataclass(frozen=True)
class Ready:
    """Jobs whose prompts are read: logits ``[n, vocab]`` of their last tokens, and their states ``[n]``.

    Reading on may overwrite both.
    """

    jobs: list[Job]
    logits: Tensor
    state: RecurrentState
    arrival: torch.cuda.Event | None = None
    """When a GPU, which reads them beside other work, will have done so; None = nobody has to wait for it."""

    @property
    def arrived(self) -> bool:
        """Whether they are read by now."""
        return self.arrival is None or self.arrival.query()

    def wait(self) -> None:
        """Work that is given to the GPU from now on comes after it; the host goes on at once."""
        if self.arrival is not None:
            torch.cuda.current_stream(self.logits.device).wait_event(self.arrival)


class PromptReader:
    """Reads about `segment` tokens at a time."""

    def __init__(self, model: RecurrentLM, segment: int, prefixes: Prefixes) -> None:
        self.model, self.segment, self.prefixes = model, segment, prefixes
        self.fixed = why_not_fixed(model) is None
        self.captures = not model.config.memory_tokens and why_no_graph(model) is None
        self.batches: PromptBatches | None = None
        self.waiting: list[Job] = []

    def prepare(self, slots: int) -> None:
        """Capture segments for short prompts, where that is possible."""
        if not (self.captures and self.fixed):
            return
        try:
            self.batches = PromptBatches(self.model, slots // SHARE_OF_SLOTS)
        except RuntimeError as error:  # out of memory, or a driver that refuses to capture
            warnings.warn(f"reading short prompts without CUDA graphs, which failed: {first_line(error)}", stacklevel=2)

    def add(self, job: Job) -> None:
        """Take a job; it begins with the longest beginning of its prompt that is known."""
        borders = self.prefixes.borders(job.start_name, job.request.prompt)
        job.read, found = self.prefixes.find(borders)
        job.state = job.start if found is None else found
        job.request.cached_tokens = job.read
        shared = self.prefixes.mark(borders)
        if shared > job.read:
            job.stops[shared] = borders[shared]
        self.waiting.append(job)

    def groups(self) -> list[list[Job]]:
        """The jobs that are read next, those of a list side by side; the first job is in the first list."""
        if self.batches is None:
            return [self._alike()]
        jobs: list[Job] = []
        tokens = 0
        for job in self.waiting:
            tokens += self._next(job)
            if jobs and tokens > self.segment:
                break
            jobs.append(job)
        short = [job for job in jobs if self._next(job) <= self.batches.longest]
        cuts = self.batches.passes([self._next(job) for job in short], self.segment)
        groups = [[short[number] for number in cut] for cut in cuts] + [[job] for job in jobs if job not in short]
        return sorted(groups, key=lambda group: jobs[0] not in group)

    def _next(self, job: Job) -> int:
        """Tokens of a job that are read next."""
        return job.next_end(self.segment) - job.read

    def _alike(self) -> list[Job]:
        """The first job, and others with about as many tokens to read."""
        first = self.waiting[0]
        length = self._next(first)
        found = [first]
        if self._apart(first):
            return found
        for job in self.waiting[1:]:
            own = self._next(job)
            widest = max(length, own)
            if len(found) == MOST_ROWS or widest * (len(found) + 1) > self.segment:
                break
            if not self._apart(job) and (widest <= SHORT or length // 2 <= own <= 2 * length):
                found.append(job)
                length = widest
        return [first] if self.captures and len(found) < WORTH_A_PASS else found

    def _apart(self, job: Job) -> bool:
        """Whether no other prompt is read beside.

        Caches of different lengths do not lie side by side, and padding would stay in one that is kept.
        """
        kept = job.wants_state or job.next_end(self.segment) < len(job.request.prompt)
        return not self.fixed and (job.state is not None or kept)

    @torch.no_grad()
    def read(self, jobs: list[Job]) -> Ready:
        """Read one segment of these jobs: those whose prompts are read then, with what comes after them."""
        ends = [job.next_end(self.segment) for job in jobs]
        pieces = [job.request.prompt[job.read : end] for job, end in zip(jobs, ends, strict=True)]
        states = [job.state for job in jobs]
        if self.batches is not None and max(map(len, pieces)) <= self.batches.longest:
            with self.batches.beside(states):
                found = self.batches.read(pieces, _side_by_side(self.model, states))
                ready = self._advanced(jobs, ends, *found)
            return replace(ready, arrival=self.batches.arrival())
        if self.batches is not None:
            self.batches.wait()
        return self._advanced(jobs, ends, *self._forward(pieces, _side_by_side(self.model, states)))

    def _advanced(self, jobs: list[Job], ends: list[int], logits: Tensor, after: RecurrentState) -> Ready:
        done = []
        for row, (job, end) in enumerate(zip(jobs, ends, strict=True)):
            job.read = end
            # Those who have more to read wait for the others' first segments: a short prompt overtakes a long one.
            self.waiting.remove(job)
            if end < len(job.request.prompt):
                self.waiting.append(job)
                job.state = job.own_state(after, row)
                if end in job.stops:
                    self.prefixes.keep(job.stops.pop(end), job.state)
            else:
                done.append(row)
        finished = [jobs[row] for row in done]
        for job in finished:
            job.state = job.start = None
        if 0 < len(done) < len(jobs):
            index = to_device(done, logits.device)
            logits, after = logits.index_select(0, index), after.select_rows(index)
        return Ready(finished, logits, after)

    def _forward(self, pieces: Sequence[Sequence[int]], state: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Tokens of some rows from their states on: the last logits ``[n, vocab]`` and the states after them."""
        device, length = self.model.device, max(map(len, pieces))
        if len(pieces) == 1:
            ids = torch.tensor([list(pieces[0])], device=device)
            found = self._captured(ids, state)
            if found is not None:
                return found
            mask = None
        else:
            ids = torch.tensor([[0] * (length - len(piece)) + list(piece) for piece in pieces], device=device)
            lengths = torch.tensor(list(map(len, pieces)), device=device)
            mask = (torch.arange(length, device=device) >= length - lengths[:, None]).long()
            if min(map(len, pieces)) == length:
                mask = None
        out = self.model(ids, attention_mask=mask, past_key_values=state, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1], out.past_key_values

    def _captured(self, ids: Tensor, state: RecurrentState | None) -> tuple[Tensor, RecurrentState] | None:
        """The same for one row in captured segments; None where the model's forward pass is to choose its way."""
        if not (self.captures and self.fixed):
            return None
        with self.model.captured_steps.alone() as alone:
            return read_prompt(self.model, captured_segments(self.model, 1), ids, state) if alone else None


def _side_by_side(model: RecurrentLM, states: Sequence[RecurrentState | None]) -> RecurrentState | None:
    """States ``[1]`` as the rows of one; None where all begin with nothing."""
    if all(state is None for state in states):
        return None
    whole = [model.zero_state(1) if state is None else state for state in states]
    if len(whole) == 1:
        return whole[0]
    # States of different dtypes, such as the first one of zeros, get the widest.
    layers = tuple(
        {name: torch.cat([state.layers[index][name] for state in whole]) for name in layer}
        for index, layer in enumerate(whole[0].layers)
    )
    return RecurrentState(layers, torch.cat([state.position for state in whole]), max(s.length for s in whole))
