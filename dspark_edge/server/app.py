"""The routes, and what stands around them.

Owns which path leads where. Refuses to know how anything is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from ..errors import DsparkError
from . import chat, completions
from .answer import Answers
from .catalogue import Catalogue, Entry
from .engine_making import MakeEngine, make_engine
from .errors import ApiError, as_api_error, of_content_type, of_validation
from .guard import STATIC, Gate, HostGuard
from .hub import ModelHub
from .log import log_failure
from .metrics import Totals
from .page import PageFiles, page_router
from .responses import Content, ErrorBody, Prompt, Tokens
from .schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
)
from .settings import Settings
from .state import ServerState
from .vocabulary import utf8

STATIC_FOLDER = Path(__file__).parent / "static"
ERROR_STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503)
ERRORS: dict[int | str, dict[str, Any]] = {s: {"model": ErrorBody} for s in ERROR_STATUSES}


def create_app(
    settings: Settings,
    catalogue: Catalogue,
    *,
    make: MakeEngine = make_engine,
    static: Path = STATIC_FOLDER,
) -> FastAPI:
    """The ASGI app; app.state.hub has the model.

    make: how an engine is made. static: folder whose index.html is the page at /, and whose files
    are at /static/; without it there is no page.
    """
    totals = Totals()
    hub = ModelHub(settings, catalogue, totals, make)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await hub.close()

    app = FastAPI(
        title="dspark_edge",
        lifespan=lifespan,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
        responses=ERRORS,
        middleware=[
            Middleware(HostGuard, settings=settings, observe=totals.observe_response),
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["Retry-After"],
            ),
            Middleware(Gate, settings=settings),
        ],
    )
    app.state.hub = hub
    app.include_router(
        _generating(Answers(hub, totals, log_content=settings.log_content), settings)
    )
    app.include_router(_text(hub, settings))
    app.include_router(_state(hub, ServerState(settings, hub, totals)))
    for kind in (ApiError, DsparkError, ValueError, Exception):
        app.add_exception_handler(kind, _tell)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(HTTPException, _tell_http)
    if static.is_dir():
        app.include_router(page_router(static / "index.html"))
        app.mount(STATIC, PageFiles(directory=static))
    return app


def _generating(answers: Answers, settings: Settings) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await answers.answer(request, chat.asked_of(body, settings.limits))

    @router.post("/v1/completions")
    async def text_completions(request: Request, body: CompletionRequest) -> Response:
        return await answers.answer(request, completions.asked_of(body, settings.limits))

    return router


def _text(hub: ModelHub, settings: Settings) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        text = await hub.text_of(body.model)
        tokens = await asyncio.to_thread(
            text.vocabulary.tokenize, body.content, add_special=body.add_special
        )
        return Tokens(tokens=tokens)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Content:
        text = await hub.text_of(body.model)
        return Content(content=await asyncio.to_thread(text.vocabulary.text_of, body.tokens))

    @router.post("/apply-template")
    async def apply_template(body: TemplateRequest) -> Prompt:
        template = (await hub.text_of(body.model)).need_template()
        rendered = await asyncio.to_thread(
            template.render,
            body.messages,
            tools=body.tools or (),
            variables=body.chat_template_kwargs,
        )
        utf8(rendered.text)  # refused where it could not be sent
        return Prompt(prompt=rendered.text)

    return router


def _state(hub: ModelHub, state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        status, body = await state.health()
        return JSONResponse(body, status)

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        return await state.stats()

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        entries = await asyncio.to_thread(hub.catalogue.entries)
        return {"object": "list", "data": [_model(entry, hub) for entry in entries]}

    @router.get("/v1/models/{model}")
    async def model(model: str) -> dict[str, Any]:
        return _model(await asyncio.to_thread(hub.catalogue.find, model), hub)

    return router


def _model(entry: Entry, hub: ModelHub) -> dict[str, Any]:
    found = entry.size_and_time()
    is_loaded = hub.state == "ready" and hub.model_id == entry.id
    return {
        "id": entry.id,
        "object": "model",
        "created": int(found[1]),
        "owned_by": "local",
        "x_dspark": {
            "size_bytes": found[0],
            "is_loaded": is_loaded,
            "is_default": entry == hub.catalogue.default,
        },
    }


async def _tell(request: Request, error: Exception) -> Response:
    told = as_api_error(error)
    if told.code == "bug":
        log_failure(f"{request.method} {ascii(request.url.path)[:200]}", error)
    return told.response()


async def _tell_invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    if isinstance(error.body, bytes):  # what is not said to be JSON comes unread
        return of_content_type(request.headers.get("content-type")).response()
    return of_validation(error.errors(), error.body).response()


async def _tell_http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    status = HTTPStatus(error.status_code)
    what = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = ApiError(status, what, code=status.name.lower()).response()
    response.headers.update(error.headers or {})
    return response
