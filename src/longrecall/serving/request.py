"""A request to an engine as its caller sees it: tokens and text as they come, the result, a way to leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from longrecall.errors import UserError
from longrecall.serving.options import RequestOptions
from longrecall.serving.text_stream import StopStrings, TextStream

LENGTH, STOP, CANCELLED = "length", "stop", "cancelled"
"""Why a request ended: it has all its tokens; a stop token or string; its caller, or the engine, gave it up."""


class Overloaded(UserError):
    """The engine's slots and its queue are full: ask again later."""


class Closed(UserError):
    """The engine takes no more requests."""


class NoNumbers(UserError):
    """The model's logits are NaN or infinite, so there is no next token."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities, of logits as the model gave them.

    Attributes:
        logprob: of the token itself.
        top: ids and logarithms of the likeliest tokens there, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Result:
    """What came out of a request.

    Attributes:
        ids: the new tokens, a stop token included.
        text: their text without special tokens, up to the first stop string; None for an engine without tokenizer.
        finish_reason: "length", "stop" or "cancelled".
        prompt_tokens: tokens of the prompt.
        cached_tokens: how many of them had been read for an earlier request.
        logprobs: one for each token, if they were asked for.
    """

    ids: list[int]
    text: str | None
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Request:
    """A request that was submitted; safe to use from any thread.

    Attributes:
        prompt: its token ids.
        options: how it is answered.
    """

    def __init__(
        self,
        prompt: list[int],
        options: RequestOptions,
        tokenizer: Any = None,
        on_token: Callable[[int], None] | None = None,
        leave: Callable[[Request], None] | None = None,
    ) -> None:
        self.prompt, self.options, self.tokenizer = prompt, options, tokenizer
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.state: Any = None
        """The state after the prompt, for requests that write nothing."""
        self._on_token, self._leave = on_token, leave
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._ends = frozenset(options.stop_tokens)
        self._stops = StopStrings(options.stop) if options.stop else None
        self._stream = TextStream(tokenizer) if options.stop else None

    @property
    def done(self) -> bool:
        """Whether no more tokens come."""
        return self.finish_reason is not None or self.error is not None

    def cancel(self) -> None:
        """Give the request up; its slot is free before the next token of the others. What was written stays."""
        self.finish(CANCELLED)

    def tokens(self) -> Iterator[int]:
        """The new token ids as they come."""
        given = 0
        while True:
            done = self._wait_beyond(given)
            new = self.ids[given:]
            yield from new
            given += len(new)
            if done:
                break
        self._check()

    def pieces(self) -> Iterator[str]:
        """The text as it comes; all pieces are the text of the result."""
        reader = _TextReader(self)
        while True:
            done = self._wait_beyond(reader.read)
            if piece := reader.new():
                yield piece
            if done:
                break
        self._check()

    def _wait_beyond(self, count: int) -> bool:
        """Wait for more than so many tokens or the end; whether it is the end."""
        with self._changed:
            self._changed.wait_for(lambda: self.done or len(self.ids) > count)
            return self.done

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end.

        Raises:
            TimeoutError: it has not come after so many seconds; the request goes on.
            Exception: what went wrong in the engine.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request has not ended after {timeout:g} seconds")
        self._check()
        assert self.finish_reason is not None
        return Result(
            list(self.ids),
            self._text(),
            self.finish_reason,
            len(self.prompt),
            self.cached_tokens,
            list(self.logprobs),
        )

    def text(self, timeout: float | None = None) -> str:
        """Wait for the end; the whole text.

        Raises:
            UserError: the engine has no tokenizer.
        """
        found = self.result(timeout).text
        if found is None:
            raise UserError("the engine has no tokenizer: ask for tokens() or result().ids")
        return found

    async def __aiter__(self) -> AsyncIterator[str]:
        """The text as it comes, for an event loop; a loop that is left early cancels the request."""
        reader = _TextReader(self)
        try:
            async for _ in self.changes():
                if piece := reader.new():
                    yield piece
            self._check()
        finally:
            if not self.done:
                self.cancel()

    async def changes(self) -> AsyncIterator[bool]:
        """Whether the request is done, each time that it has gone on, the last time included."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            # Once for all tokens since the last look: waking a loop takes as long as a small step.
            # A loop that has been closed is told nothing; that must not be an error of those who are decoded beside.
            if not changed.is_set():
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._listeners.append(tell)
        try:
            while True:
                changed.clear()
                done = self.done
                yield done
                if done:
                    return
                if not self.done:
                    await changed.wait()
        finally:
            with self._changed:
                self._listeners.remove(tell)

    async def wait(self) -> Result:
        """`result` for an event loop; one that is cancelled meanwhile cancels the request."""
        try:
            async for _ in self.changes():
                pass
        finally:
            if not self.done:
                self.cancel()
        return self.result()

    def _text(self) -> str | None:
        if self.tokenizer is None:
            return None
        if self._stops is not None and self.finish_reason == STOP:
            return self._stops.text
        return TextStream(self.tokenizer).add(self.text_ids(), last=True)

    def text_ids(self) -> list[int]:
        """The new tokens without a last one that was to end the text."""
        with self._changed:
            return self.ids[:-1] if self.ids and self.ids[-1] in self._ends else list(self.ids)

    def so_far(self) -> tuple[list[int], bool]:
        """`text_ids`, and whether they are all."""
        with self._changed:
            return self.text_ids(), self.done

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    # What the engine tells, in its own thread.

    def add(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """One more token."""
        try:
            with self._changed:
                if self.done:
                    return
                self._add(token, logprobs)
            if self._on_token is not None:
                self._on_token(token)
        except Exception as error:
            # The caller's own, or the tokenizer's: those who are decoded beside have no part in it. A request that had
            # just ended stays as it was.
            self.fail(error)
        self._tell()

    def _add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.ids.append(token)
        stopped, full = token in self._ends, len(self.ids) == self.options.max_new_tokens
        if self._stops is not None and self._stream is not None:
            piece = self._stream.add([] if stopped else [token], last=stopped or full)
            stopped = self._stops.add(piece) or stopped
        if stopped or full:
            self.finish_reason = STOP if stopped else LENGTH

    def finish(self, reason: str) -> None:
        """No more tokens come."""
        with self._changed:
            if self.done:
                return
            self.finish_reason = reason
        self._tell()

    def fail(self, error: Exception) -> None:
        """It cannot be answered."""
        with self._changed:
            if self.done:
                return
            self.error = error
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
            for tell in self._listeners:
                tell()
        if self.done and self._leave is not None:
            self._leave(self)


class _TextReader:
    """What of a request's text is new, each time somebody asks; the end of a text that may yet be cut is held back."""

    def __init__(self, request: Request) -> None:
        self.request, self.stream = request, TextStream(request.tokenizer)
        if request.tokenizer is None:
            raise UserError("the engine has no tokenizer: ask for tokens() or result().ids")
        self.read, self.held = 0, ""
        self.given = 0

    def new(self) -> str:
        # Whether it is the end is asked with the tokens: it may have come since the caller was told of a change.
        request = self.request
        ids, done = request.so_far()
        self.held += self.stream.add(ids[self.read :], last=done)
        self.read = len(ids)
        stops = request._stops
        if stops is None:
            piece, self.held = self.held, ""
        elif done and request.finish_reason == STOP:
            # The engine has cut the text where it stops.
            piece = stops.text[self.given :]
        else:
            end = len(self.held) if done else max(0, len(self.held) - stops.held)
            piece, self.held = self.held[:end], self.held[end:]
        self.given += len(piece)
        return piece
