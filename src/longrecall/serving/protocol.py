"""The completions and chat protocol of OpenAI: what a body asks for, checked, and what is answered. Plain data."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.errors import UserError, did_you_mean
from longrecall.serving.options import RequestOptions
from longrecall.serving.request import CANCELLED, Result, TokenLogprobs

MOST_ANSWERS = 128
"""Answers to one body at most: prompts times n."""

COMPLETION_TOKENS, CHAT_TOKENS = 16, 512
"""Tokens of an answer where the body does not say."""

EXTENSIONS = frozenset(("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "after"))
"""Fields that are not OpenAI's, with the names that other servers give them."""

SERVED = (
    EXTENSIONS
    | frozenset(
        (
            "model",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "n",
            "stream",
            "stream_options",
            "stop",
        )
    )
    | {"seed", "logprobs"}
)
"""Fields of both kinds of body."""

IGNORED = frozenset(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"))
"""Fields that change nothing here."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "parallel_tool_calls": (True, False, None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
}
"""Fields that are not served, and the values with which they ask for nothing."""


class Refused(Exception):
    """A body that cannot be answered: a status of HTTP, the reason, and the field that it is about."""

    def __init__(self, reason: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.param, self.code = status, reason, param, code


def error_body(reason: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = {404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": reason, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Asked:
    """A checked body.

    Attributes:
        prompts: each text or token ids; of a chat one text, made by the template.
        count: answers to each prompt.
        options: of every answer.
        stream: whether pieces are sent as they come.
        usage: whether a stream ends with the counts.
        after: the text of the bank that comes before, None = none.
        chat: whether it is a chat.
    """

    prompts: list[str | list[int]]
    count: int
    options: RequestOptions
    stream: bool
    usage: bool
    after: str | None
    chat: bool

    def options_of(self, number: int) -> dict[str, Any]:
        """What the answer of this number has for itself: with a seed, one of its own."""
        return {} if self.options.seed is None else {"seed": self.options.seed + number}


def parse(body: Any, *, chat: bool, template: Any) -> Asked:
    """Check a body.

    `template`: of a chat: messages -> text; None where there is none.

    Raises:
        Refused: something in it is wrong or not served; the reason says what.
    """
    if not isinstance(body, Mapping):
        raise Refused("the body must be a JSON object")
    own = {"messages", "top_logprobs"} if chat else {"prompt"}
    for name, value in body.items():
        if name in SERVED | IGNORED | own:
            continue
        if name in NEUTRAL and value in NEUTRAL[name]:
            continue
        known = name in NEUTRAL
        reason = "is not served here" if known else f"is not a field of a request.{did_you_mean(name, SERVED | own)}"
        raise Refused(f"{name} {reason}", name)
    given = {name: value for name, value in body.items() if value is not None}
    prompts: list[str | list[int]] = [_chat_prompt(given, template)] if chat else _prompts(given)
    count = _typed(given, "n", int, 1)
    if count < 1 or count * len(prompts) > MOST_ANSWERS:
        raise Refused(f"n must be at least 1, and at most {MOST_ANSWERS} answers are given at once", "n")
    after = given.get("after")
    if after is not None and not isinstance(after, str):
        raise Refused("after must be the name of a text in the bank", "after")
    more = _typed(given, "stream_options", dict, {})
    try:
        options = RequestOptions(**_options(given, chat))
    except UserError as error:
        option, _, reason = str(error).partition(" ")  # the line begins with the engine's name of the option
        name = _field_of(option, given, chat)
        raise Refused(f"{name} {reason}", name) from None
    stream = _typed(given, "stream", bool, False)
    return Asked(prompts, count, options, stream, bool(more.get("include_usage")), after, chat)


def _typed(given: Mapping[str, Any], name: str, kind: type, otherwise: Any) -> Any:
    value = given.get(name, otherwise)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "a whole number", bool: "true or false", dict: "an object", list: "a list"}
        raise Refused(f"{name} must be {words[kind]}", name)
    return value


def _options(given: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 16:
        raise Refused("stop must be a text or a list of at most 16", "stop")
    limit = given.get("max_completion_tokens", given.get("max_tokens", CHAT_TOKENS if chat else COMPLETION_TOKENS))
    found = {
        "max_new_tokens": limit,
        "temperature": given.get("temperature", 1.0),
        "stop": tuple(stop),
        "stop_tokens": tuple(_typed(given, "stop_token_ids", list, [])),
        "ignore_end": _typed(given, "ignore_eos", bool, False),
        "logprobs": _logprobs(given, chat),
    }
    same = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")
    found |= {name: given[name] for name in same if name in given}
    if found.get("top_k") == -1:  # what others write for all of them
        found["top_k"] = 0
    return found


def _field_of(option: str, given: Mapping[str, Any], chat: bool) -> str:
    """Return the protocol's name of an option of the engine."""
    names = {"stop_tokens": "stop_token_ids", "logprobs": "top_logprobs" if chat else "logprobs"}
    names["max_new_tokens"] = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    return names.get(option, option)


def _logprobs(given: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:
        return given.get("logprobs")
    top = _typed(given, "top_logprobs", int, 0)
    if _typed(given, "logprobs", bool, False):
        return int(top)
    if top:
        raise Refused("top_logprobs needs logprobs: true", "top_logprobs")
    return None


def _prompts(given: Mapping[str, Any]) -> list[str | list[int]]:
    prompt = given.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_token(token) for token in prompt):
            return [prompt]
        if all(isinstance(text, str) for text in prompt):
            return list(prompt)
        if all(isinstance(ids, list) and ids and all(map(_is_token, ids)) for ids in prompt):
            return list(prompt)
    raise Refused("prompt must be a text, a list of texts, a list of token ids or a list of such lists", "prompt")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _chat_prompt(given: Mapping[str, Any], template: Any) -> str:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list of at least one message", "messages")
    if template is None:
        raise Refused("the tokenizer of this model has no chat template: ask /v1/completions", "messages")
    return str(template([_message(message, index) for index, message in enumerate(messages)]))


def _message(message: Any, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refused(f"{where} must have a role and a content", where)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise Refused(f"{where}.content has a part that is not text, and this model reads only text", where)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refused(f"{where}.content must be a text", where)
    return {"role": message["role"], "content": content}


class Answer:
    """The bodies of one answer, whole or in pieces."""

    def __init__(self, asked: Asked, model: str, tokenizer: Any) -> None:
        self.chat, self.tokenizer, self.asked = asked.chat, tokenizer, asked
        kind = "chatcmpl" if asked.chat else "cmpl"
        self.head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = []
        for index, result in enumerate(results):
            told = self._logprobs(result.ids, result.logprobs)
            what = {"message": {"role": "assistant", "content": result.text}} if self.chat else {"text": result.text}
            choices.append({"index": index, **what, "logprobs": told, "finish_reason": reason_of(result)})
        name = "chat.completion" if self.chat else "text_completion"
        return self.head | {"object": name, "choices": choices, "usage": self.usage(results)}

    def piece(
        self,
        index: int,
        text: str,
        *,
        ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
        reason: str | None = None,
        first: bool = False,
    ) -> dict[str, Any]:
        """The body of a piece of a stream."""
        delta = {"role": "assistant"} if first else {}
        what = {"delta": delta | ({"content": text} if text or first else {})} if self.chat else {"text": text}
        told = self._logprobs(ids, logprobs)
        return self._part([{"index": index, **what, "logprobs": told, "finish_reason": reason}])

    def counts(self, results: Sequence[Result]) -> dict[str, Any]:
        """The last body of a stream whose caller wants the counts."""
        return self._part([]) | {"usage": self.usage(results)}

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.chat else "text_completion"
        return self.head | {"object": name, "choices": choices}

    def usage(self, results: Sequence[Result]) -> dict[str, Any]:
        """Tokens that were read and written; a prompt with several answers counts once."""
        prompt = sum(result.prompt_tokens for result in results[:: self.asked.count])
        written = sum(len(result.ids) for result in results)
        cached = sum(result.cached_tokens for result in results[:: self.asked.count])
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written} | details

    def _token(self, token: int) -> str:
        return str(self.tokenizer.decode([token])) if self.tokenizer is not None else str(token)

    def _logprobs(self, ids: Sequence[int], found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self.asked.options.logprobs is None:
            return None
        if not self.chat:
            top = [{self._token(token): _json(value) for token, value in each.top} for each in found]
            tokens, values = [self._token(token) for token in ids], [_json(each.logprob) for each in found]
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top}
        content = []
        for token, each in zip(ids, found, strict=True):
            likeliest = [self._entry(other, value) for other, value in each.top]
            content.append(self._entry(token, each.logprob) | {"top_logprobs": likeliest})
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token(token)
        return {"token": text, "logprob": _json(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _json(logprob: float) -> float:
    """JSON has no infinity; this is what the protocol has for next to nothing."""
    return max(logprob, -9999.0)


def reason_of(result: Result) -> str:
    """Why an answer ended, in the protocol's words; it has none for an answer that was broken off."""
    return "stop" if result.finish_reason == CANCELLED else result.finish_reason
