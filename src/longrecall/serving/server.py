"""A server before an engine: OpenAI's completions and chat protocol over HTTP, on aiohttp."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError
from longrecall.installing import check_installed
from longrecall.serving.engine import Engine
from longrecall.serving.protocol import Answer, Asked, Refused, error_body, parse, reason_of
from longrecall.serving.request import Closed, NoNumbers, Overloaded, Request, TokenLogprobs

if TYPE_CHECKING:
    from aiohttp import web

LARGEST_BODY = 64 << 20
"""Bytes of a body at most: a prompt of ten million tokens is about as long."""

RETRY_AFTER = 1
"""Seconds after which a client that was refused for load may ask again."""

Handler = Callable[[Any], Any]


class Server:
    """The application: `app` is aiohttp's. `name`: of the model, as clients call it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name
        self.closing = False
        check_installed("aiohttp", "serving")
        from aiohttp import web

        @web.middleware
        async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._errors(request, handler)

        self.app = web.Application(client_max_size=LARGEST_BODY, middlewares=[errors])
        self.app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.models),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
            ]
        )

    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What goes wrong, in the protocol's form."""
        from aiohttp import web

        headers = {}
        try:
            found: web.StreamResponse = await handler(request)
            return found
        except web.HTTPException as error:
            status, body = error.status, error_body(error.reason, error.status)
        except Refused as error:
            status, body = error.status, error_body(error.reason, error.status, error.param, error.code)
        except Overloaded as error:
            status, body = 429, error_body(str(error), 429, code="overloaded")
            headers = {"Retry-After": str(RETRY_AFTER)}
        except Closed as error:
            status, body = 503, error_body(str(error), 503)
        except NoNumbers as error:
            status, body = 500, error_body(str(error), 500)
        except UserError as error:
            status, body = 400, error_body(str(error), 400)
        except Exception as error:
            status, body = 500, error_body(f"{type(error).__name__}: {error}", 500)
        return web.json_response(body, status=status, headers=headers)

    async def health(self, _: web.Request) -> web.Response:
        """Whether it takes requests, and how busy it is."""
        from aiohttp import web

        status = self.engine.broken or ("closing" if self.closing else "ok")
        return web.json_response({"status": status, **self.engine.load()}, status=200 if status == "ok" else 503)

    async def models(self, request: web.Request) -> web.Response:
        """The one model."""
        from aiohttp import web

        card = {"id": self.name, "object": "model", "created": 0, "owned_by": "longrecall"}
        asked = request.match_info.get("name")
        if asked is None:
            return web.json_response({"object": "list", "data": [card]})
        self._check_model(asked)
        return web.json_response(card)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._answer(request, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._answer(request, chat=True)

    def _check_model(self, name: object) -> None:
        if name != self.name:
            raise Refused(f"there is no model {name!r} here, but {self.name!r}", "model", 404, "model_not_found")

    def _template(self) -> Callable[[list[dict[str, str]]], str] | None:
        tokenizer = self.engine.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            return None

        def apply(messages: list[dict[str, str]]) -> str:
            try:
                # transformers runs templates in a sandbox of jinja.
                return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
            except Exception as error:  # a template raises what it likes about messages that it does not know
                reason = " ".join(str(error).split())
                raise Refused(f"the chat template refuses these messages: {reason}", "messages") from error

        return apply

    async def _answer(self, request: web.Request, chat: bool) -> web.StreamResponse:
        from aiohttp import web

        if self.closing:
            raise Closed("the server is closing")
        try:
            body = json.loads(await request.text())
        except (ValueError, LookupError, RecursionError) as error:
            raise Refused(f"the body is not JSON: {error}") from None
        if isinstance(body, dict) and body.get("model") is not None:
            self._check_model(body["model"])
        asked = parse(body, chat=chat, template=self._template() if chat else None)
        most = self.engine.slots + self.engine.queue
        if asked.count * len(asked.prompts) > most:
            raise Refused(f"n and the prompts ask for more than {most} answers at once, which this server holds", "n")
        answer = Answer(asked, self.name, self.engine.tokenizer)
        requests: list[Request] = []
        try:
            # In a thread: a long text takes its time in the tokenizer, and a state comes from a disk.
            submitting = asyncio.ensure_future(asyncio.to_thread(self._submit, asked, requests))
            try:
                await asyncio.shield(submitting)
            finally:
                # A client that goes meanwhile must not leave requests that nobody cancels.
                await asyncio.wait((submitting,))
                # Looked at also where nobody is left to be told; asyncio would print it.
                submitting.exception()
            if asked.stream:
                return await self._stream(request, asked, answer, requests)
            results = [await each.wait() for each in requests]
            return web.json_response(answer.whole(results))
        finally:
            # aiohttp cancels the handler of a client that has gone.
            for each in requests:
                each.cancel()

    def _submit(self, asked: Asked, requests: list[Request]) -> None:
        special = False if asked.chat else None
        for prompt in asked.prompts:
            for _ in range(asked.count):
                own = asked.options_of(len(requests))
                more: dict[str, Any] = {"after": asked.after, "add_special_tokens": special}
                requests.append(self.engine.submit(prompt, asked.options, **more, **own))

    async def _stream(
        self, request: web.Request, asked: Asked, answer: Answer, requests: list[Request]
    ) -> web.StreamResponse:
        """Server-sent events, a piece of an answer each, as they come."""
        from aiohttp import web

        # What goes wrong before the first token is told by a status.
        await asyncio.gather(*(_begun(each) for each in requests[:1]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)

        async def send(body: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode())

        try:
            async with asyncio.TaskGroup() as group:
                for index, each in enumerate(requests):
                    group.create_task(_send_pieces(index, each, answer, send))
            if asked.usage:
                await send(answer.counts([each.result() for each in requests]))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except ExceptionGroup as errors:
            # The status is sent: the error is an event.
            with suppress(ConnectionError):
                await send(error_body(str(errors.exceptions[0]), 500))
        except ConnectionError:
            pass
        return response


async def _begun(request: Request) -> None:
    async for done in request.changes():
        if request.ids or done:
            break
    if request.error is not None:
        raise request.error


async def _send_pieces(index: int, request: Request, answer: Answer, send: Callable[[dict[str, Any]], Any]) -> None:
    told, first = 0, True
    async for piece in request:
        ids, found = _since(request, told)
        told += len(ids)
        await send(answer.piece(index, piece, ids=ids, logprobs=found, first=first))
        first = False
    ids, found = _since(request, told)
    reason = reason_of(request.result())
    await send(answer.piece(index, "", ids=ids, logprobs=found, reason=reason, first=first))


def _since(request: Request, told: int) -> tuple[list[int], list[TokenLogprobs]]:
    """Tokens that have come meanwhile, and what is told of them, if that was asked for."""
    if request.options.logprobs is None:
        return [], []
    count = len(request.ids)
    return request.ids[told:count], request.logprobs[told:count]


async def serve(server: Server, host: str, port: int, *, grace: float, ready: Callable[[str, int], None]) -> None:
    """Serve until SIGTERM or SIGINT; then answer what is there for `grace` seconds at most, and end.

    `ready`: called with host and port once clients can come. A second signal ends at once.

    Raises:
        UserError: the port cannot be used.
    """
    from aiohttp import web

    runner = web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    now = asyncio.Event()

    def told() -> None:
        (now if stop.is_set() else stop).set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for each in signals:
        loop.add_signal_handler(each, told)
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise UserError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or --port"
            ) from error
        listening: Any = runner.addresses[0]
        ready(host, listening[1])
        await stop.wait()
        server.closing = True
        finished = asyncio.ensure_future(asyncio.to_thread(server.engine.close, finish=True, timeout=grace))
        impatient = asyncio.ensure_future(now.wait())
        await asyncio.wait((finished, impatient), return_when=asyncio.FIRST_COMPLETED)
        impatient.cancel()
        if not finished.done():
            await asyncio.to_thread(server.engine.close)
        await finished
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
        await runner.cleanup()
