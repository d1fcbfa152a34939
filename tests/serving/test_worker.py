"""The work between two looks at an engine's queue: who joins when, who moves where, and what is read beside steps."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.inference import prompt_batches
from longrecall.inference.prompt_batches import PromptBatches
from longrecall.inference.slots import SlotStep
from longrecall.serving import worker as working
from longrecall.serving.options import RequestOptions
from longrecall.serving.prefixes import Prefixes
from longrecall.serving.reading import Job
from longrecall.serving.request import CANCELLED, Request
from longrecall.serving.sampling import Sampling
from longrecall.serving.worker import Worker
from tests.serving.test_engine import generated, model_of, prompts_of

MODEL = model_of("gla")
PROMPTS = prompts_of(5, longest=24)
MOST = 14
"""Tokens of an answer at most."""
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.3, "top_k": 6, "seed": 6}]


class Arrival:
    """In the place of a GPU's event: the prompts are read when they have been asked for so many times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Beside(PromptBatches):
    """Prompts that are read while others are decoded, on a CPU."""

    looks: Callable[[], int]

    def arrival(self) -> Any:
        return Arrival(self.looks())


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments for prompts, steps of several widths, tokens that are told while the next ones are under way."""
    monkeypatch.setattr(prompt_batches, "ROWS", (1, 4))
    monkeypatch.setattr(prompt_batches, "LENGTHS", (8, 16))
    monkeypatch.setattr(working, "LAGGING", ("cpu",))
    monkeypatch.setattr("longrecall.inference.slots.MOST_RECORDED", 0)
    monkeypatch.setattr(working.Ready, "wait", lambda ready: None)


def worker_of(slots: int, looks: Callable[[], int]) -> Worker:
    """One whose prompts arrive when they have been asked for so many times."""
    worker = Worker(MODEL, slots, 64, 0)
    worker.prepare()
    worker.reader.batches = Beside(MODEL, slots)
    worker.reader.batches.looks = looks
    return worker


def job_of(prompt: list[int], **options: Any) -> Job:
    request = Request(prompt, RequestOptions(**options))
    return Job(request, Sampling(request.options, prompt, 40, torch.device("cpu")))


def turn(worker: Worker, waiting: list[Job]) -> None:
    """As the engine's thread has it."""
    worker.drop_ended()
    for _ in range(worker.takes(len(waiting))):
        worker.add(waiting.pop(0))
    worker.work()


def finish(worker: Worker, waiting: list[Job]) -> None:
    for _ in range(1000):
        if not (worker.busy or waiting):
            return
        turn(worker, waiting)
    raise AssertionError("somebody waits for ever")


@functools.cache
def alone(which: int, how: int) -> list[int]:
    """All tokens of a request that nobody else is beside: those of `generate`, where nothing is drawn."""
    if not OPTIONS[how]:
        return generated(MODEL, PROMPTS[which], MOST)
    worker, job = Worker(MODEL, 1, 64, 0), job_of(PROMPTS[which], max_new_tokens=MOST, **OPTIONS[how])
    finish(worker, [job])
    return job.request.ids


Asked = tuple[int, int, int, int, int | None]
"""Turns before it, prompt, options, tokens, and the turns after which it is cancelled."""

ASKED = st.tuples(
    st.integers(0, 3), st.integers(0, 4), st.integers(0, 2), st.integers(1, MOST), st.none() | st.integers(0, 6)
)


@settings(deadline=None, max_examples=12, derandomize=True)
@given(st.lists(ASKED, min_size=8, max_size=16), st.integers(2, 9), st.integers(0, 9))
def come_and_go(asked: list[Asked], slots: int, seed: int) -> None:
    chance = random.Random(seed)
    worker, waiting = worker_of(slots, lambda: chance.randint(0, 2)), []
    jobs, cancels, now = [], {}, 0
    for gap, which, how, count, cancel in asked:
        for _ in range(gap):
            for job in cancels.pop(now, []):
                job.request.cancel()
            turn(worker, waiting)
            now += 1
        job = job_of(PROMPTS[which], max_new_tokens=count, **OPTIONS[how])
        waiting.append(job)
        jobs.append(job)
        if cancel is not None:
            cancels.setdefault(now + cancel, []).append(job)
    finish(worker, waiting)
    for job, (_, which, how, count, _) in zip(jobs, asked, strict=True):
        ids = job.request.ids
        assert ids == alone(which, how)[: len(ids)]
        assert len(ids) == count or job.request.finish_reason == CANCELLED
    assert worker.free == slots and worker.chooser is None


def test_requests_come_and_go_as_they_like(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read beside steps, and sequences move to the first rows; tokens are those of each request alone."""
    moved = []
    move = SlotStep.move

    def seen(step: SlotStep, rows: Any, to: Any) -> None:
        moved.append(rows)
        move(step, rows, to)

    monkeypatch.setattr(SlotStep, "move", seen)
    monkeypatch.setattr(working, "SETTLED", 1)
    come_and_go()
    assert len(moved) > 5


def test_who_moves_takes_the_state_along(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of five goes on alone in the first slot. The tokens would be others if its state stayed behind."""
    move = SlotStep.move

    def without_states(step: SlotStep, rows: Any, to: Any) -> None:
        kept = [{name: x.clone() for name, x in buffers.items()} for buffers in step.buffers]
        move(step, rows, to)
        for buffers, before in zip(step.buffers, kept, strict=True):
            for name, x in buffers.items():
                x.copy_(before[name])

    def answer() -> list[int]:
        worker, counts = worker_of(5, lambda: 0), (6, 6, 6, 6, MOST)
        jobs = [job_of(prompt, max_new_tokens=count) for prompt, count in zip(PROMPTS, counts, strict=True)]
        last = jobs[-1].request
        monkeypatch.setattr(worker.reader, "groups", lambda: [[job] for job in worker.reader.waiting])
        finish(worker, jobs)
        assert worker.rows == [None] * 5
        return last.ids

    monkeypatch.setattr(working, "SETTLED", 0)
    assert answer() == alone(4, 0)
    monkeypatch.setattr(SlotStep, "move", without_states)
    assert answer() != alone(4, 0)


def test_a_lone_request_waits_for_nothing(as_on_a_gpu: None) -> None:
    """Its second token is under way in the turn in which it comes; with free slots so is one among others."""
    looks = [1000, 0]
    worker = worker_of(32, lambda: looks.pop(0))
    first, second = (job_of([1, 2], max_new_tokens=40) for _ in range(2))
    turn(worker, [first])
    assert first.launched == 2 and len(first.request.ids) == 1
    turn(worker, [second])
    turn(worker, [])
    turn(worker, [])
    assert second.launched == 3 and len(second.request.ids) == 2


def test_free_slots_gather_where_they_are_scarce() -> None:
    """Two of 32; not for ever, and not where there are enough."""
    worker = Worker(MODEL, 32, 64, 0)
    assert worker.takes(100) == 32 and worker.takes(0) == 0
    worker.rows = [job_of([1]) for _ in range(31)] + [None]
    assert worker.takes(1) == 1
    assert [worker.takes(2) for _ in range(working.LONGEST_GATHERING)] == [0] * working.LONGEST_GATHERING
    assert worker.takes(2) == 1 and worker.takes(2) == 0
    worker.rows[0] = None
    assert worker.takes(9) == 2


def test_a_step_that_fails_leaves_nobody_waiting(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those included who have all their tokens but have not been told the last ones."""
    worker = worker_of(2, lambda: 0)
    jobs = [job_of([1], max_new_tokens=2), job_of([2], max_new_tokens=9)]
    turn(worker, list(jobs))
    assert jobs[0].has_all and not jobs[0].request.done

    def fail(step: SlotStep, rows: int) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(SlotStep, "decode", fail)
    worker.work()
    for job in jobs:
        with pytest.raises(RuntimeError, match="no memory"):
            job.request.result(timeout=0)
    assert not worker.busy


def test_a_tokenizer_that_fails_is_its_own_requests_error() -> None:
    """It looks for the stop strings of one request; another, decoded beside, goes on."""

    class Broken:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            if len(ids) > 1:
                raise TypeError("no such token")
            return ""

    worker, other = Worker(MODEL, 2, 64, 0), job_of(PROMPTS[0], max_new_tokens=9)
    worker.add(other)
    worker.work()
    own = job_of(PROMPTS[0], max_new_tokens=9)
    own.request = Request(PROMPTS[0], RequestOptions(stop="x", max_new_tokens=9), Broken())
    finish(worker, [own])
    with pytest.raises(TypeError, match="no such token"):
        own.request.result(timeout=0)
    assert other.request.ids == alone(0, 0)[:9]


@pytest.mark.parametrize("name", ["gla", "hybrid"])
def test_a_state_that_is_kept_is_that_of_its_text_alone(name: str) -> None:
    """Whatever is read at the same time: no padding in its caches, nobody else's length."""
    model = model_of(name)
    worker, kept = Worker(model, 4, 64, 0), job_of([1, 2, 3])
    kept.wants_state = True
    finish(worker, [job_of([4] * 20, max_new_tokens=1), kept])
    with torch.no_grad():
        alone = model(torch.tensor([[1, 2, 3]])).past_key_values
    found = kept.request.state
    assert found.length == 3
    for own, layer in zip(found.layers, alone.layers, strict=True):
        assert {key: x.shape for key, x in own.items()} == {key: x.shape for key, x in layer.items()}


def test_a_prompt_beside_a_longer_one_needs_room_for_itself_alone() -> None:
    """Caches that were read beside a longer prompt have columns of padding, more than the slots have."""
    model = model_of("hybrid")
    worker = Worker(model, 4, 1024, 0)
    jobs = [job_of([1, 2, 3] * 100, max_new_tokens=1), job_of([4, 5, 6] * 60, max_new_tokens=5)]
    finish(worker, list(jobs))
    assert [job.request.result(timeout=0).ids for job in jobs] == [
        generated(model, job.request.prompt, job.request.options.max_new_tokens) for job in jobs
    ]


def test_many_who_come_at_once_are_read_at_once(as_on_a_gpu: None) -> None:
    """Where most slots are free; else those who write would wait for them."""
    worker = worker_of(8, lambda: 1000)
    first, *others = (job_of(prompt, max_new_tokens=40) for prompt in PROMPTS * 2)
    turn(worker, [first])
    turn(worker, others[:5])
    assert worker.running == 6 and worker.ready is None
    turn(worker, others[5:7])
    assert worker.running == 6 and worker.ready is not None and worker.free == 0


def test_shared_beginnings_side_by_side(as_on_a_gpu: None) -> None:
    """A state is kept in the middle of a prompt; others go on from it, beside one that begins with nothing."""
    begin = [3, 1, 4, 1, 5, 9, 2, 6]
    prompts = [begin + PROMPTS[0], begin + PROMPTS[1], begin + PROMPTS[2], PROMPTS[3], begin + PROMPTS[4]]
    worker = worker_of(16, lambda: 1)
    worker.reader.prefixes = Prefixes(1 << 20, block=len(begin))
    jobs = [job_of(prompt, max_new_tokens=MOST) for prompt in prompts]
    for few in (jobs[:1], jobs[1:2], jobs[2:]):
        finish(worker, list(few))
    assert [job.request.cached_tokens for job in jobs] == [0, 0, 8, 0, 8]
    assert [job.request.ids for job in jobs] == [generated(MODEL, prompt, MOST) for prompt in prompts]


def test_who_has_no_memory_for_segments_reads_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: object, most_rows: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 51 GiB")

    monkeypatch.setattr("longrecall.serving.reading.why_no_graph", lambda model: None)
    monkeypatch.setattr("longrecall.serving.reading.PromptBatches", refused)
    worker, job = Worker(MODEL, 2, 64, 0), job_of(PROMPTS[0], max_new_tokens=4)
    with pytest.warns(UserWarning, match="without CUDA graphs, which failed: .* 51 GiB"):
        worker.prepare()
    finish(worker, [job])
    assert job.request.ids == alone(0, 0)[:4]
