"""The HTTP server's routes, as a Starlette application."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from saccade._openai.errors import error_type
from saccade._transport.local_aio import AsyncLocalConnection
from service.common.config import HttpFrontOptions
from service.http import (
    batches,
    chat,
    completions,
    files,
    message_batches,
    messages,
    metrics,
    models,
    openapi,
    responses,
    tokens,
)
from service.http.call import OTHER_ROUTE, Endpoint, Front, Handler, Receive, Scope, Send, request_id_of
from service.http.messages import error_form_of

SWEEP_SECONDS = 60.0
"""Time between two deletions of expired files."""
PLAYGROUND = Path(__file__).resolve().parent / "playground"
"""The pages of the playground and its scripts."""
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; connect-src 'self'; font-src 'self'; manifest-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = [
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
]

ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "/health", models.health),
    ("GET", "/ready", models.ready),
    ("GET", "/status", models.status),
    ("GET", "/metrics", metrics.metrics),
    ("GET", "/openapi.json", openapi.openapi),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{name:path}", models.get_model),
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/responses", responses.responses),
    ("POST", "/v1/responses/input_tokens", responses.count_input_tokens),
    ("POST", "/v1/messages", messages.messages),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
    ("POST", "/v1/messages/batches", message_batches.create),
    ("GET", "/v1/messages/batches", message_batches.list_batches),
    ("GET", "/v1/messages/batches/{batch_id}", message_batches.get),
    ("DELETE", "/v1/messages/batches/{batch_id}", message_batches.delete),
    ("POST", "/v1/messages/batches/{batch_id}/cancel", message_batches.cancel),
    ("GET", "/v1/messages/batches/{batch_id}/results", message_batches.results),
    ("POST", "/v1/embeddings", tokens.embeddings),
    ("POST", "/v1/files", files.upload),
    ("GET", "/v1/files", files.list_files),
    ("GET", "/v1/files/{file_id}", files.get_file),
    ("DELETE", "/v1/files/{file_id}", files.delete_file),
    ("GET", "/v1/files/{file_id}/content", files.content),
    ("POST", "/v1/batches", batches.create),
    ("GET", "/v1/batches", batches.list_batches),
    ("GET", "/v1/batches/{batch_id}", batches.get),
    ("POST", "/v1/batches/{batch_id}/cancel", batches.cancel),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
]


def described_routes() -> tuple[tuple[str, str, str], ...]:
    """Method, path and description of each route."""
    return tuple((method, path, " ".join((handle.__doc__ or "").split())) for method, path, handle in ROUTES)


def make_app(options: HttpFrontOptions, engine: AsyncLocalConnection | None = None) -> Starlette:
    """The application. `app.state.front` has what all requests share.

    Args:
        engine: answers requests instead of the servers in `options`.
    """
    front = Front(options, engine)
    front.routes = described_routes()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(_sweep(front))
        yield
        sweeper.cancel()
        await front.upstream.close()
        front.files.close()

    served = [
        Route(path, Endpoint(front, f"{method} {path}", handle), methods=[method]) for method, path, handle in ROUTES
    ]
    routes: list[BaseRoute] = [*served]
    routes.append(Mount("/", _Page(front, StaticFiles(directory=PLAYGROUND, html=True), served)))
    middleware = []
    if options.http_cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(options.http_cors_origins), allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[
                    "x-request-id", "request-id", "retry-after", "x-saccade-ignored", "x-saccade-missing-servers",
                    "content-range", "etag",
                ],
            )
        )  # fmt: skip
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _refusal}, lifespan=lifespan
    )
    app.state.front = front
    return app


async def _sweep(front: Front) -> None:
    """Deletes expired files periodically, even if nobody asks for one."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        front.files.sweep()


async def _refusal(request: Request, error: Exception) -> Response:
    """Answers requests for unknown paths and methods, with the form of errors of the path's API."""
    assert isinstance(error, HTTPException)
    path, status, request_id = request.url.path, error.status_code, request_id_of(request.headers)
    request.app.state.front.count(OTHER_ROUTE, status)
    told: dict[str, Any] = {
        "message": f"{request.method} {path[:200]}: {error.detail}", "type": error_type(status), "param": None,
        "code": "HTTP", "request_id": request_id,
    }  # fmt: skip
    form = error_form_of(path)
    document = {"error": told} if form is None else form(told, status)
    headers = {**(error.headers or {}), "x-request-id": request_id}
    return Response(json.dumps(document), status, headers, "application/json")


class _Page:
    """Static files, with headers that forbid scripts, styles and connections of other origins.

    Args:
        served: the routes before this one. Requests for their paths with another method arrive here and get status 405.
    """

    def __init__(self, front: Front, app: StaticFiles, served: Sequence[Route]) -> None:
        self._front, self._app, self._served = front, app, served
        self._paths = {".", *(str(file.relative_to(PLAYGROUND)) for file in PLAYGROUND.rglob("*.*"))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        matching = [route for route in self._served if route.path_regex.match(scope["path"])]
        if methods := {method for route in matching for method in route.methods or ()}:
            raise HTTPException(405, headers={"allow": ", ".join(sorted(methods))})
        if self._app.get_path(scope) not in self._paths:  # StaticFiles would give other methods than GET status 405
            raise HTTPException(404, self._elsewhere(scope["path"]))

        async def with_headers(message: Scope) -> None:
            if message["type"] == "http.response.start":
                self._front.count(OTHER_ROUTE, message["status"])
                message["headers"] = [*message["headers"], *PAGE_HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _elsewhere(self, path: str) -> str | None:
        """What is wrong with a path that lacks /v1 or has it twice: some clients add it to their base URL, others do
        not. None for other paths."""
        meant = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
        if not any(route.path_regex.match(meant) for route in self._served):
            return None
        return f"Not Found; the path is {meant}: OpenAI's clients need a base URL with /v1, Anthropic's one without it"
