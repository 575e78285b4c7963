"""SGLang's HTTP protocol in front of the engine loop, on aiohttp.

POST /generate, /tokenize, /detokenize, /abort_request, /flush_cache
GET /health, /health_generate, /ping, /model_info, /server_info, /v1/loads

With a token, every one of them wants it (`Authorization: Bearer …`, as SGLang's --api-key) before it looks at anything else. A
connection that has not said what it wants after REQUEST_SECONDS, drop by drop or not at all, is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from asyncrl.engines.embedded.loop import EngineLoop
from asyncrl.engines.embedded.score_wire import is_scoring, parse_score, score_responses
from asyncrl.engines.embedded.sequences import Update
from asyncrl.engines.embedded.wire import BadRequest, Call, Limits, parse_generate, response_of
from asyncrl.errors import GenerationFailed

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 256 * 2**20
HEALTH_TIMEOUT_SECONDS = 20.0
_THEIRS = (HttpProcessingError, ConnectionError)
REQUEST_SECONDS = 30.0  # for the head of a request, and again for its body

Decode = Callable[[Sequence[int], bool], str]


class Sink:
    """Where the updates of one call arrive. `left`: those of its sequences whose end was not taken out yet."""

    def __init__(self) -> None:
        self.left = 0
        self._updates: list[Update] = []
        self._changed = asyncio.Event()

    def put(self, update: Update) -> None:
        self._updates.append(update)
        self._changed.set()

    async def take(self) -> list[Update]:
        """All that are there, one at least.

        No deadline here: the client's own ends the wait (its disconnect cancels the handler), and so does the engine's end, which
        finishes every sequence.
        """
        await self._changed.wait()
        self._changed.clear()
        updates, self._updates = self._updates, []
        self.left -= sum(update.finish is not None for update in updates)
        return updates


class Updates:
    """Carries updates from the loop's thread to the waiting calls: one wake-up of the event loop per decode step."""

    def __init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()

    def __call__(self, updates: Sequence[Update]) -> None:
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(_dispatch, updates)


def _dispatch(updates: Sequence[Update]) -> None:
    for update in updates:
        update.sequence.sink.put(update)


class HttpFront:
    """The HTTP server of one engine. `start` binds and returns the URL."""

    def __init__(
        self, engine: EngineLoop, limits: Limits, *, model_path: str, decode: Decode | None = None, token: str | None = None
    ):
        self._engine, self._limits, self._model_path, self._decode = engine, limits, model_path, decode
        self._middlewares: list[Middleware] = [_errors_as_json] if token is None else [_errors_as_json, _asks_for(token)]
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Raises OSError when the address is taken."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=self._middlewares)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.post("/abort_request", self._abort),
                web.post("/flush_cache", self._flush),
                web.get("/flush_cache", self._flush),
                web.get("/ping", self._ping),
                web.get("/health", self._ping),
                web.get("/health_generate", self._health_generate),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                web.get("/v1/loads", self._loads),
            ]
        )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=2.0,
            keepalive_timeout=REQUEST_SECONDS,
            logger=_log_of_our_own_failures(),
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        address = self._runner.addresses[0]
        return f"http://{address[0]}:{address[1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if is_scoring(body):
            return await self._score(body)
        sink = Sink()
        call = parse_generate(body, self._limits, sink)
        sink.left = len(call.sequences)
        self._engine.submit(call.sequences)
        try:
            return await (self._stream(request, call, sink) if call.stream else self._answer(call, sink))
        finally:
            if sink.left:  # the client is gone, or writing to it failed: nobody wants the rest
                self._abandon(sink)

    async def _score(self, body: Any) -> web.Response:
        call = parse_score(body, self._limits)
        log_probs = await asyncio.wrap_future(self._engine.score(call.rows, call.temperature))
        return _json(score_responses(call, log_probs, self._engine.version))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if self._limits.encode is None or not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
            raise BadRequest('tokenize needs {"prompt": "text"}, and a server with a tokenizer')
        tokens = self._limits.encode(body["prompt"])
        return _json({"tokens": tokens, "count": len(tokens)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        tokens = body.get("tokens") if isinstance(body, dict) else None
        known = range(self._limits.vocab_size)
        if self._decode is None or not isinstance(tokens, list) or not all(type(id) is int and id in known for id in tokens):
            raise BadRequest('detokenize needs {"tokens": [ids]}, and a server with a tokenizer')
        return _json({"text": self._decode(tokens, body.get("skip_special_tokens") is not False)})

    async def _answer(self, call: Call, sink: Sink) -> web.Response:
        responses: dict[int, dict[str, Any]] = {}
        while sink.left:
            ended = [update for update in await sink.take() if update.finish is not None]
            responses.update((update.sequence.index, response_of(update, call, self._decode)) for update in ended)
        ordered = [responses[index] for index in range(len(call.sequences))]
        for response in ordered:
            del response["index"]
        return _json(ordered if call.batch else ordered[0])

    async def _stream(self, request: web.Request, call: Call, sink: Sink) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while True:
            chunks = [self._chunk(update, call) for update in await sink.take()]
            if not sink.left:
                break
            await response.write(b"".join(chunks))
        await response.write_eof(b"".join([*chunks, b"data: [DONE]\n\n"]))
        return response

    def _chunk(self, update: Update, call: Call) -> bytes:
        payload = response_of(update, call, self._decode)
        if not call.batch:
            del payload["index"]
        return b"data: %b\n\n" % orjson.dumps(payload)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object with rid or abort_all")
        rid = body.get("rid")
        if body.get("abort_all") is True:
            self._engine.abort(None)
        elif isinstance(rid, str) and rid:
            self._engine.abort([rid])
        elif isinstance(rid, list) and rid and all(isinstance(entry, str) for entry in rid):
            self._engine.abort(rid)
        else:
            raise BadRequest('abort_request needs {"rid": "…"} or {"abort_all": true}')
        return web.Response()

    def _abandon(self, sink: Sink) -> None:
        try:
            self._engine.abandon(sink)
        except GenerationFailed:
            log.debug("the engine ended before an abandoned request was aborted")

    async def _flush(self, request: web.Request) -> web.Response:
        """Nothing to drop: no prefix outlives the sequences that use it."""
        return web.Response(text="no cache outlives its requests\n")

    async def _ping(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.alive else 503)

    async def _health_generate(self, request: web.Request) -> web.Response:
        sink = Sink()
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        self._engine.submit(parse_generate(body, self._limits, sink).sequences)
        (update,) = await asyncio.wait_for(sink.take(), HEALTH_TIMEOUT_SECONDS)
        return web.Response(status=503 if update.finish is None or update.finish.kind == "abort" else 200)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self._model_path,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "weight_version": self._engine.version,
                "max_context_tokens": self._limits.context,
                "batch_invariant": self._engine.batch_invariant,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        running, waiting = self._engine.load()
        stats = self._engine.stats
        return web.json_response(
            {
                "server": "asyncrl embedded engine",
                "model_path": self._model_path,
                "weight_version": self._engine.version,
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
                "generated_tokens": stats.generated_tokens,
                "prefilled_tokens": stats.prefilled_tokens,
                "shared_prefills": stats.shared_prefills,
                "decode_steps": stats.decode_steps,
                "decode_seconds": stats.decode_seconds,
                "forward_cpu_seconds": stats.forward_cpu_seconds,
            }
        )

    async def _loads(self, request: web.Request) -> web.Response:
        running, waiting = self._engine.load()
        return web.json_response({"loads": [{"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}]})


async def _body(request: web.Request) -> Any:
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            data = await request.read()
        return orjson.loads(data)
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _log_of_our_own_failures() -> logging.Logger:
    """For aiohttp, which logs bytes that are no request, and clients that hang up, as errors of the server, with a traceback:
    whoever does so could fill the disk."""
    logger = log.getChild("requests")
    if not logger.filters:
        logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _THEIRS)))
    return logger


def _asks_for(token: str) -> Middleware:
    """Nobody gets past without it; how long a comparison takes tells nothing about how much of it was right."""
    wanted = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if hmac.compare_digest(given, wanted):
            return await handler(request)
        refusal = _error(401, "Unauthorized", "this server wants its token: send it as Authorization: Bearer TOKEN")
        refusal.headers["WWW-Authenticate"] = "Bearer"
        return refusal

    return check


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(400, "BadRequestError", str(error))
    except web.HTTPException as error:
        return _error(error.status, error.reason, f"{request.method} {request.path}: {error.reason}")
    except (GenerationFailed, TimeoutError) as error:
        return _error(503, type(error).__name__, str(error))


def _error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)
