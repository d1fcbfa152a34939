"""The server: OpenAI's protocol on a socket of this machine; how clients and the server leave."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
from aiohttp.test_utils import TestClient, TestServer

from longrecall import Engine
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.serving import Overloaded
from longrecall.serving.server import Server, serve
from tests.serving.test_engine import model_of

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
ENDLESS = {"prompt": "a", "max_tokens": 10**6, "ignore_eos": True}
Client = TestClient[Any, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    bank = tmp_path_factory.mktemp("bank")
    with Engine(model_of("gla", vocabulary=258), tokenizer, slots=3, queue=1, bank=bank) as found:
        yield found


def asked(engine: Engine, talk: Callable[[Client], Awaitable[None]], name: str = "tiny") -> None:
    """Talk to a server of this engine."""

    async def run() -> None:
        # It cancels the handlers of clients that have gone, as `serve` does.
        async with TestClient(TestServer(Server(engine, name).app)) as client:
            await talk(client)

    asyncio.run(run())


async def post(client: Client, body: Any, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    async with client.post(path, json=body) as response:
        return response.status, await response.json()


async def events(client: Client, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
    async with client.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        lines = [line.decode().strip() async for line in response.content]
    found = [line.removeprefix("data: ") for line in lines if line]
    assert found.pop() == "[DONE]"
    return [json.loads(line) for line in found]


def test_completions(engine: Engine) -> None:
    expected = engine.submit("Once", max_new_tokens=20, ignore_end=True).text()

    async def talk(client: Client) -> None:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        status, found = await post(client, body)
        assert status == 200 and found["object"] == "text_completion" and found["model"] == "tiny"
        assert [found["choices"][0][name] for name in ("text", "finish_reason")] == [expected, "length"]
        assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (4, 20)
        parts = await events(client, body | {"stream_options": {"include_usage": True}})
        assert parts[-1]["usage"] == found["usage"] and not parts[-1]["choices"]
        assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == expected
        assert parts[-2]["choices"][0]["finish_reason"] == "length"

        sampled = body | {"temperature": 1, "seed": 5, "n": 2, "prompt": ["Once", "Twice"], "logprobs": 2}
        found = (await post(client, sampled))[1]
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
        assert len({choice["text"] for choice in found["choices"]}) == 4
        told = found["choices"][0]["logprobs"]
        assert len(told["tokens"]) == len(told["token_logprobs"]) == 20 and len(told["top_logprobs"][0]) == 2
        assert found["usage"]["prompt_tokens"] == 9
        parts = [part["choices"][0] for part in await events(client, sampled)]
        for index, choice in enumerate(found["choices"]):
            own = [part for part in parts if part["index"] == index]
            assert "".join(part["text"] for part in own) == choice["text"]
            assert sum(len(part["logprobs"]["tokens"]) for part in own) == 20
        # Extensions, and fields that ask for nothing.
        more = {"top_k": 1, "presence_penalty": 0, "user": "me", "echo": False, "stop": expected[5:7]}
        found = (await post(client, body | {"temperature": 1} | more))[1]
        assert found["choices"][0]["text"] == expected[: expected.index(expected[5:7])]
        assert found["choices"][0]["finish_reason"] == "stop"

    asked(engine, talk)


def test_chats(engine: Engine) -> None:
    expected = engine.submit("user: Hello\nassistant:", max_new_tokens=9, add_special_tokens=False).text()

    async def talk(client: Client) -> None:
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "max_tokens": 9}
        body |= {"temperature": 0, "logprobs": True, "top_logprobs": 1}
        status, found = await post(client, body, path)
        assert status == 200 and found["object"] == "chat.completion"
        assert found["choices"][0]["message"] == {"role": "assistant", "content": expected}
        told = found["choices"][0]["logprobs"]["content"]
        assert len(told) == found["usage"]["completion_tokens"]
        assert told[0]["top_logprobs"][0]["logprob"] == told[0]["logprob"]
        parts = [part["choices"][0] for part in await events(client, body, path)]
        assert parts[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in parts) == expected
        assert sum(len(part["logprobs"]["content"]) for part in parts) == len(told)

    asked(engine, talk)


def test_models_health_and_texts_of_the_bank(engine: Engine) -> None:
    assert engine.bank is not None
    engine.bank.add("book", "A long text. ")
    expected = engine.submit("Who?", after="book", max_new_tokens=8).text()

    async def talk(client: Client) -> None:
        async with client.get("/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["tiny"]
        async with client.get("/v1/models/other") as response:
            assert response.status == 404
        async with client.get("/health") as response:
            assert await response.json() == {"status": "ok", "slots": 3, "running": 0, "waiting": 0, "queue": 1}
        found = (await post(client, {"prompt": "Who?", "after": "book", "temperature": 0, "max_tokens": 8}))[1]
        assert found["choices"][0]["text"] == expected

    asked(engine, talk)


BAD: list[tuple[Any, str]] = [
    ([1], "JSON object"),
    ({}, "prompt must be"),
    ({"prompt": ""}, "empty"),
    ({"prompt": [1, "a"]}, "prompt must be"),
    ({"prompt": [999]}, "token 999"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens must be"),
    ({"prompt": "a", "max_completion_tokens": 0}, "max_completion_tokens must be"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids must be"),
    ({"prompt": "a", "temperatur": 1}, 'Did you mean "temperature"'),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias is not served"),
    ({"prompt": "a", "n": 0}, "n must be"),
    ({"prompt": "a", "n": 5}, "more than 4 answers"),
    ({"prompt": "a", "temperature": 10**400}, "temperature must be"),
    ({"prompt": "half \ud800"}, "at place 5"),
    ({"prompt": "a", "stream": "yes"}, "true or false"),
    ({"prompt": "a", "after": "nothing"}, 'no text "nothing"'),
    ({"prompt": "a", "after": "../secret"}, "cannot name a text"),
]


def test_bad_bodies_are_refused_with_the_reason(engine: Engine) -> None:
    async def talk(client: Client) -> None:
        for body, words in BAD:
            status, found = await post(client, body)
            assert status == 400 and words in found["error"]["message"], body
            assert found["error"]["type"] == "invalid_request_error"
        async with client.post("/v1/completions", data=b"{nothing") as response:
            assert response.status == 400
        assert (await post(client, {"prompt": "a", "model": "gpt"}))[0] == 404
        async with client.get("/v1/nothing") as response:
            assert response.status == 404 and "error" in await response.json()
        status, found = await post(client, {"messages": [{"role": "user", "content": 1}]}, "/v1/chat/completions")
        assert status == 400 and "messages[0]" in found["error"]["message"]
        engine.tokenizer.chat_template = None
        try:
            body = {"messages": [{"role": "user", "content": "a"}]}
            status, found = await post(client, body, "/v1/chat/completions")
        finally:
            engine.tokenizer.chat_template = TEMPLATE
        assert status == 400 and "no chat template" in found["error"]["message"]

    asked(engine, talk)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.005)


def test_clients_that_go_free_their_slots_and_too_many_are_refused(engine: Engine) -> None:
    async def talk(client: Client) -> None:
        streamed = await client.post("/v1/completions", json=ENDLESS | {"stream": True})
        await streamed.content.readline()
        others = [asyncio.ensure_future(post(client, ENDLESS)) for _ in range(3)]
        await until(lambda: engine.load()["waiting"] == 1)
        async with client.post("/v1/completions", json=ENDLESS) as response:
            assert response.status == 429 and "Retry-After" in response.headers
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        streamed.close()
        for other in others:
            other.cancel()
        await until(lambda: engine.load()["running"] + engine.load()["waiting"] == 0)
        assert (await post(client, {"prompt": "a", "max_tokens": 2}))[0] == 200

    asked(engine, talk)


def test_a_client_that_goes_before_it_is_refused_leaves_no_trace(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for, answer = threading.Event(), threading.Event()

    def submit(*_: Any, **__: Any) -> None:
        asked_for.set()
        answer.wait(60)
        raise Overloaded("full")

    monkeypatch.setattr(engine, "submit", submit)
    printed: list[str] = []

    async def talk(client: Client) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context["message"]))
        asking = asyncio.ensure_future(post(client, {"prompt": "a"}))
        await until(asked_for.is_set)
        asking.cancel()
        await asyncio.sleep(0.05)
        answer.set()
        await asyncio.sleep(0.05)
        gc.collect()

    asked(engine, talk)
    assert printed == []


@pytest.mark.parametrize("grace", [60.0, 0.0])
def test_a_signal_ends_the_server(grace: float) -> None:
    """With time it finishes what is there; without, it cancels."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")
    import aiohttp

    engine = Engine(model_of("gla", vocabulary=258), byte_tokenizer(), slots=1)
    found: list[Any] = []

    async def ask(port: int) -> None:
        body = {"prompt": "a", "max_tokens": 300 if grace else 10**6, "ignore_eos": True, "stream": True}
        url = f"http://127.0.0.1:{port}/v1/completions"
        async with aiohttp.ClientSession() as client, client.post(url, json=body) as response:
            await response.content.readline()
            os.kill(os.getpid(), signal.SIGTERM)
            found.append((await response.content.read()).decode())

    async def run() -> None:
        tasks = []
        ready = lambda _, port: tasks.append(asyncio.ensure_future(ask(port)))  # noqa: E731
        await serve(Server(engine, "tiny"), "127.0.0.1", 0, grace=grace, ready=ready)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)

    asyncio.run(run())
    assert '"finish_reason": "length"' in found[0] if grace else '"finish_reason": "stop"' in found[0]
    with pytest.raises(UserError, match="closed"):
        engine.submit("a")


def test_a_port_that_is_taken(engine: Engine) -> None:
    import socket

    with socket.socket() as taken, pytest.raises(UserError, match="--port"):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        asyncio.run(serve(Server(engine, "tiny"), "127.0.0.1", port, grace=0, ready=lambda *_: None))
    with pytest.raises(UserError, match="another --host"):
        asyncio.run(serve(Server(engine, "tiny"), "203.0.113.1", 0, grace=0, ready=lambda *_: None))


def test_the_verb_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from longrecall.cli.main import main

    assert main(["serve", str(tmp_path / "nothing")]) == 2
    assert main(["serve", str(tmp_path), "--port", "99999"]) == 2
    assert main(["serve", str(tmp_path), "--bank", str(tmp_path / "txts")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.startswith("longrecall: error: ") for line in told] == [True] * 3
    assert "txts is not a folder" in told[2]
