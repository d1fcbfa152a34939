"""What a request asks for: how many tokens, how they are chosen, where they end. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longrecall.errors import UserError

MOST_LOGPROBS = 20
"""Alternatives of a token whose log probabilities are told at most."""

COLDEST = 1e-20
"""Temperatures below it take the likeliest token: logits that are divided by less may become infinite."""

LARGEST = 1e20
"""Of numbers that logits are divided by or multiplied with, for the same reason."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How one request is answered, whatever others ask for.

    Attributes:
        max_new_tokens: tokens to write at most.
        temperature: None, 0 or next to it takes the likeliest token; else probabilities of logits / temperature.
        top_k: sample from so many of the likeliest tokens; 0 = all.
        top_p: sample from the likeliest tokens that sum up to it; 1 = all.
        min_p: leave out tokens whose probability is less than so many times that of the likeliest.
        repetition_penalty: scores of tokens that are in the prompt or written already are divided by it (negative ones
            multiplied); 1 = they stay.
        stop: the text ends before the first of these strings.
        stop_tokens: ids that end it, beside the model's own; they are the last of the ids and not in the text.
        ignore_end: write on past the model's own end token.
        seed: of this request's random numbers; None = another one each time.
        logprobs: None, or so many of the likeliest tokens are told with their log probabilities at every token, beside
            that of the token itself.
    """

    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_end: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_tokens"):
            given: Any = getattr(self, name)
            value = (given,) if isinstance(given, str | int) else tuple(given)
            object.__setattr__(self, name, value)
        self.check()

    @property
    def samples(self) -> bool:
        """Whether chance has a say."""
        return self.temperature is not None and self.temperature >= COLDEST

    @property
    def filters(self) -> bool:
        """Whether only some of the tokens are sampled from."""
        return self.samples and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def check(self) -> None:
        """Raise UserError, one line, on a value that means nothing."""
        _whole("max_new_tokens", self.max_new_tokens, 1)
        _whole("top_k", self.top_k, 0)
        if self.temperature is not None:
            _number("temperature", self.temperature, 0, LARGEST)
        _number("top_p", self.top_p, 0, 1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 1 / LARGEST, LARGEST)
        if self.top_p == 0:
            raise UserError("top_p must be above 0, got 0")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UserError("stop must be texts of at least one character")
        for token in self.stop_tokens:
            _whole("stop_tokens", token, 0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MOST_LOGPROBS)


def _whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        above = "" if most is None else f" and at most {most}"
        raise UserError(f"{name} must be a whole number of at least {least}{above}, got {value!r}")


def _number(name: str, value: Any, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise UserError(f"{name} must be a number from {least:g} to {most:g}, got {value!r}")
