"""An engine: requests of any length at any time, decoded together in slots of constant-size states.

A request joins and leaves between two tokens of the others. Its tokens are those that `generate()` writes for it alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longrecall.errors import UserError, did_you_mean
from longrecall.inference.eligibility import why_not_fixed
from longrecall.inference.slots import why_no_slots
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.checkpoint_tokenizer import load_tokenizer
from longrecall.models.loading import load, preferred_device
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.serving.bank import Bank
from longrecall.serving.options import RequestOptions
from longrecall.serving.reading import Job
from longrecall.serving.request import CANCELLED, Closed, Overloaded, Request, Result
from longrecall.serving.sampling import Sampling
from longrecall.serving.waiting import ORDERS, Waiting
from longrecall.serving.worker import Worker

SLOTS = {"cpu": 8, "cuda": 64}
"""Sequences that are decoded together, by the type of device; others as "cuda"."""

SEGMENT = {"cpu": 1024, "cuda": 8192}
"""Tokens of prompts that are read between two tokens of those who write."""

ROOM = 8192
"""Tokens of a sequence at most in models whose caches grow."""

PREFIX_BYTES = 256 << 20
"""Of states of beginnings that prompts share."""

IDLE = 1.0
"""Seconds after which a thread without work lets go of its engine, which nobody else may hold any more."""

Prompt = str | Sequence[int]


class Engine:
    """Answers requests with one model, in a thread of its own; every method may be called from any thread.

    Use it as a context manager, or `close` it. The model is not to be changed or trained meanwhile.

    >>> with Engine(BASE, slots=2) as engine:
    ...     request = engine.submit("Once upon a time", max_new_tokens=4)
    ...     len(request.result().ids)
    4
    """

    def __init__(
        self,
        model: RecurrentLM | str | Path,
        tokenizer: Any = None,
        *,
        slots: int | None = None,
        queue: int = 256,
        segment: int | None = None,
        room: int = ROOM,
        bank: str | Path | None = None,
        prefix_bytes: int = PREFIX_BYTES,
        order: str = "arrival",
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        quantize: str | None = None,
    ) -> None:
        """Begin to take requests.

        Args:
            model: a model in evaluation mode, or a checkpoint, which brings its tokenizer.
            tokenizer: for prompts that are text, and for text of answers; without one both are token ids.
            slots: sequences that are decoded together; None = 64 on a GPU, 8 on a CPU.
            queue: requests that may wait for a slot; more are refused (`Overloaded`).
            segment: about how many prompt tokens are read in one pass, while the other sequences wait; None = 8,192 on
                a GPU, 1,024 on a CPU.
            room: most tokens of a sequence, for models with attention layers, whose caches grow. They begin with
                little room and get more when a request needs it.
            bank: a folder of states of texts that were read before; it need not exist.
            prefix_bytes: memory for states of beginnings that several prompts share; 0 = share none.
            order: which waiting request gets the next slot: "arrival", the first that came, or "longest", the one that
                asks for the most new tokens. With the longest first a batch of unequal requests ends sooner, as no long
                answer is left alone at the end. But a short request may wait for as long as longer ones come.
            dtype: of a checkpoint's weights; None = as stored.
            device: of a checkpoint's weights; None = the GPU if there is one.
            quantize: "int8" or "fp8" weights of a checkpoint, as `longrecall.load` makes them.

        Raises:
            UserError: the model's layers cannot be decoded in slots; a number that makes no sense.
            torch.OutOfMemoryError: the states of so many slots do not fit into memory.
        """
        if not isinstance(model, RecurrentLM):
            checkpoint = open_checkpoint(model)
            if tokenizer is None:
                tokenizer = load_tokenizer(checkpoint.path, checkpoint.config.vocab_size)
            model = load(model, dtype=dtype, device=preferred_device(device), quantize=quantize)
        if reason := why_no_slots(model):
            raise UserError(f"this model cannot be decoded in slots: {reason}; generate() reads one batch at a time")
        kind = model.device.type if model.device.type in SLOTS else "cuda"
        slots = SLOTS[kind] if slots is None else slots
        segment = SEGMENT[kind] if segment is None else segment
        for name, value, least in (
            ("slots", slots, 1),
            ("queue", queue, 0),
            ("segment", segment, 1),
            ("room", room, 2),
            ("prefix_bytes", prefix_bytes, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if order not in ORDERS:
            raise UserError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        self.model, self.tokenizer = model, tokenizer
        self.slots, self.queue, self.segment = slots, queue, segment
        self.room = None if why_not_fixed(model) is None else room
        self.end_tokens = _end_tokens(model, tokenizer)
        self.bank = None if bank is None else Bank(bank, model, tokenizer, self._read_only)
        self._waiting = Waiting(order)
        self._changed, self._encoding = threading.Condition(), threading.Lock()
        self._inside: set[Request] = set()
        self._closing = self._ended = False
        self.broken: str | None = None
        """What has ended the engine, which must not happen; None while nothing has."""
        worker = Worker(model, slots, segment, prefix_bytes)
        self._running = lambda: worker.taken
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), worker, started), name="longrecall engine", daemon=True
        )
        self._thread.start()
        started.result()

    def submit(
        self,
        prompt: Prompt,
        options: RequestOptions | None = None,
        *,
        after: str | None = None,
        on_token: Callable[[int], None] | None = None,
        add_special_tokens: bool | None = None,
        **more: Any,
    ) -> Request:
        """Ask for a continuation; returns at once.

        Args:
            prompt: text, or token ids.
            options: how it is answered; `more` are fields of `RequestOptions` that replace its own.
            after: the name of a text in the bank that comes before the prompt.
            on_token: called with every new token, in the engine's thread: it must be quick.
            add_special_tokens: whether a text gets the token that marks a beginning; None = unless `after` is given.
            more: see `options`.

        Raises:
            Overloaded: all slots are taken and the queue is full.
            UserError: the prompt is empty, has ids that the model has not, or is too long for it; there is no such text
                in the bank; an option that means nothing.
        """
        options = _with(options, more)
        key, start = ((), None) if after is None else self._bank().found(after)
        # What follows a text is no beginning. A learned state has read nothing.
        special = (start is None or start.length == 0) if add_special_tokens is None else add_special_tokens
        ids = self._ids(prompt, special)
        job = self._job(ids, options, start, on_token)
        job.start_name = repr(key) if key else ""
        self._check_room(job)
        return self._enqueue(job)

    def generate(
        self, prompts: Iterable[Prompt], options: RequestOptions | None = None, *, after: str | None = None, **more: Any
    ) -> list[Result]:
        """Answer all of these prompts, in their order; there may be more of them than the queue holds.

        Raises:
            UserError: as `submit`, and what went wrong in the engine; the other requests are given up then.
        """
        self._check_thread("generate")
        requests: list[Request] = []
        results: list[Result] = []
        try:
            for prompt in prompts:
                while True:
                    try:
                        requests.append(self.submit(prompt, options, after=after, **more))
                        break
                    except Overloaded:
                        self._wait_for_place()
            results = [request.result() for request in requests]
        finally:
            for request in requests[len(results) :]:
                request.cancel()
        return results

    def load(self) -> dict[str, int]:
        """How busy it is: slots, those taken, requests that wait for one, and how many may."""
        with self._changed:
            waiting = len(self._waiting)
        return {"slots": self.slots, "running": self._running(), "waiting": waiting, "queue": self.queue}

    def close(self, *, finish: bool = False, timeout: float | None = None) -> None:
        """Take no more requests, and end.

        `finish`: answer those that are there first, for so many seconds at most (None = as long as it takes); the
        others are cancelled.

        Raises:
            UserError: `on_token` asks for `finish`, in the thread that all answers come from.
        """
        if finish:
            self._check_thread("close(finish=True)")
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if finish:
                self._changed.wait_for(lambda: not self._inside or self._ended, timeout)
            left = list(self._inside)
        for request in left:
            request.finish(CANCELLED)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            # The memory of all slots goes now, also where somebody keeps the engine.
            self._running = lambda: 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_thread(self, what: str) -> None:
        if threading.current_thread() is self._thread:
            raise UserError(f"{what} waits for answers, so call it from another thread than on_token's")

    def _bank(self) -> Bank:
        if self.bank is None:
            raise UserError("this engine has no bank of states: Engine(..., bank=FOLDER), or serve --bank FOLDER")
        return self.bank

    def _ids(self, prompt: Prompt, special: bool) -> list[int]:
        vocabulary = self.model.config.vocab_size
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("the engine has no tokenizer: give token ids, or Engine(..., tokenizer=...)")
            if (place := _half_character(prompt)) is not None:
                raise UserError(f"the prompt has half a character (a lone surrogate) at place {place}; give whole text")
            with self._encoding:
                ids = list(self.tokenizer.encode(prompt, add_special_tokens=special))
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise UserError("the prompt is empty; give at least one token to continue")
        if min(ids) < 0 or max(ids) >= vocabulary:
            wrong = next(token for token in ids if not 0 <= token < vocabulary)
            raise UserError(f"the prompt has token {wrong}, but the model's tokens are 0 to {vocabulary - 1}")
        return ids

    def _job(
        self,
        ids: list[int],
        options: RequestOptions,
        start: RecurrentState | None,
        on_token: Callable[[int], None] | None = None,
    ) -> Job:
        if not options.ignore_end:
            options = replace(options, stop_tokens=(*options.stop_tokens, *self.end_tokens))
        if options.stop and self.tokenizer is None:
            raise UserError("the engine has no tokenizer, and cannot look for stop strings; give stop_tokens")
        request = Request(ids, options, self.tokenizer, on_token, self._left)
        sampling = Sampling(options, ids, self.model.config.vocab_size, self.model.device)
        return Job(request, sampling, start)

    def _check_room(self, job: Job) -> None:
        if self.room is not None and job.room > self.room:
            raise UserError(
                f"the request takes {job.room} tokens with its answer, but a slot holds {self.room}. Attention "
                "layers keep every token: ask for fewer, or give the engine more room"
            )

    def _read_only(self, tokens: list[int], start: RecurrentState | None) -> RecurrentState:
        """The state after these tokens, for the bank."""
        self._check_thread("adding a text to the bank")
        job = self._job(tokens, RequestOptions(max_new_tokens=1), start)
        job.wants_state = True
        request = self._enqueue(job, must=True)
        if request.result().finish_reason == CANCELLED:
            raise Closed(self.broken or "the engine was closed before the text had been read")
        state: RecurrentState = request.state
        return state

    def _enqueue(self, job: Job, must: bool = False) -> Request:
        with self._changed:
            if self._closing:
                raise Closed(self.broken or "the engine is closed")
            if len(self._inside) >= self.slots + self.queue and not must:
                raise Overloaded(
                    f"all {self.slots} slots are taken and {self.queue} requests wait already; try again later"
                )
            self._inside.add(job.request)
            self._waiting.add(job)
            self._changed.notify_all()
        return job.request

    def _wait_for_place(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or len(self._inside) < self.slots + self.queue)

    def _left(self, request: Request) -> None:
        """A request has ended."""
        with self._changed:
            self._inside.discard(request)
            self._waiting.drop(request)
            self._changed.notify_all()

    def _turn(self, worker: Worker) -> bool:
        """One turn of the engine's thread; False when it is to end."""
        with self._changed:
            if self._ended:
                return False
            worker.drop_ended()
            for _ in range(worker.takes(len(self._waiting))):
                job = self._waiting.next()
                if not job.request.done:
                    worker.add(job)
            if not worker.busy:
                self._changed.wait(timeout=IDLE)
                return True
        worker.work()
        return True

    def _broke(self, error: BaseException) -> None:
        """What must not happen: nobody is left waiting."""
        with self._changed:
            self.broken = f"the engine has failed: {type(error).__name__}: {error}"
            self._closing = self._ended = True
            left, self._inside = list(self._inside), set()
            self._changed.notify_all()
        for request in left:
            request.fail(RuntimeError(self.broken))


def _serve(engine: weakref.ref[Engine], worker: Worker, started: Future[None]) -> None:
    """The engine's thread; an engine that nobody holds any more ends it."""
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)  # of this thread
    try:
        worker.prepare()
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(None)
    del started
    while (held := engine()) is not None:
        try:
            if not held._turn(worker):
                return
        except BaseException as error:
            held._broke(error)
            raise
        del held


def _with(options: RequestOptions | None, more: dict[str, Any]) -> RequestOptions:
    known = RequestOptions.__dataclass_fields__
    for name in more:
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(f'there is no such option "{name}".{near} There are {", ".join(known)}')
    return RequestOptions(**more) if options is None else replace(options, **more)


def _half_character(text: str) -> int | None:
    """The place of a character that stands for nothing by itself, as JSON may hold it; None where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _end_tokens(model: RecurrentLM, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a text: what the model says, else the tokenizer."""
    settings: Any = model.generation_config
    end = None if settings is None else settings.eos_token_id
    if end is None:
        end = getattr(tokenizer, "eos_token_id", None)
    return () if end is None else (end,) if isinstance(end, int) else tuple(end)
