"""A retriever served over HTTP, for many trainers at once: POST {queries, topk, return_scores} -> {result}."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from freshper.envs.search.retrieval import Retriever
from freshper.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MAX_QUERIES = 1_024  # of a request
MAX_TOPK = 1_000
MAX_BODY_BYTES = 8 << 20
_LAST_PORT = 65_535
MAX_CONNECTIONS = 256
"""At once; who comes when there are more is told 503, and tries again a little later."""


def make_app(retriever: Retriever) -> Starlette:
    """The web application: ``POST /retrieve``, and ``GET /health``, which answers ``{"status": "ok"}``.

    A request that is none gets status 400 (413 when it is too long) and ``{"error": what is wrong}``. With
    ``return_scores`` false the documents stand in the lists themselves. ``topk`` is 3 where none is given.
    """
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtraError("starlette", "search") from error

    async def retrieve(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"error": f"the request has more than {MAX_BODY_BYTES} bytes"}, 413)
        try:
            asked = _read_request(bytes(body))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"result": await run_in_threadpool(_answer, retriever, *asked)})

    async def health(request: Request) -> Response:  # noqa: ARG001
        return JSONResponse({"status": "ok"})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


def _read_request(body: bytes) -> tuple[list[str], int, bool]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is no JSON: {error}") from None
    queries = asked.get("queries") if isinstance(asked, Mapping) else None
    if not (isinstance(queries, list) and all(isinstance(query, str) for query in queries)):
        raise ValueError("queries must be a list of texts")
    if len(queries) > MAX_QUERIES:
        raise ValueError(f"{len(queries)} queries in one request: at most {MAX_QUERIES}")
    topk, scores = asked.get("topk", 3), asked.get("return_scores", False)
    topk = 3 if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk {topk!r} must be an integer in [1, {MAX_TOPK}]")
    if not isinstance(scores, bool):
        raise ValueError(f"return_scores {scores!r} must be true or false")
    return queries, topk, scores


def _answer(retriever: Retriever, queries: list[str], topk: int, scores: bool) -> list[list[dict[str, Any]]]:
    answers = []
    for query in queries:
        found = retriever.retrieve(query, topk)
        documents = [{"contents": passage.text} for passage in found]
        with_scores = [{"document": d, "score": p.score} for d, p in zip(documents, found, strict=True)]
        answers.append(with_scores if scores else documents)
    return answers


def serve(retriever: Retriever, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted; ``ready`` is told the URL once connections are taken. Port 0 is any free one.

    Raises :class:`ConfigError` for an address that cannot be had.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtraError("uvicorn", "search") from error
    app = make_app(retriever)
    if not 0 <= port <= _LAST_PORT:
        raise ConfigError(f"port {port} must be in [0, {_LAST_PORT}]")
    if not host:
        raise ConfigError("host '' would let in every machine that reaches this one: say 0.0.0.0 if that is meant")
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"{host} port {port} cannot be served at: {error}; choose another --port") from None
    with listening:
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listening.getsockname()[1]}/retrieve")
        config = uvicorn.Config(app, log_level="warning", limit_concurrency=MAX_CONNECTIONS, lifespan="off")
        uvicorn.Server(config).run(sockets=[listening])
