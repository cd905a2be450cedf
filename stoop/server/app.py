"""The routes."""

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware

from stoop.server import page
from stoop.server.chat import chat_completions
from stoop.server.completions import completions
from stoop.server.direct import Direct, Routes
from stoop.server.errors import RETRY_AFTER, add_handlers, refuse, unavailable
from stoop.server.gate import Gate
from stoop.server.hooks import make_tracer
from stoop.server.metrics import ServerMetrics
from stoop.server.prompts import plain_messages
from stoop.server.protocol.chat import ChatRequest
from stoop.server.protocol.completions import (
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from stoop.server.protocol.responses import ResponsesRequest
from stoop.server.responses import responses
from stoop.server.service import Service
from stoop.server.settings import ServerSettings
from stoop.server.transport import json_response
from stoop.version import __version__

if TYPE_CHECKING:
    from stoop.async_llm import AsyncLLM


# As `_add_generation` has them; those are for the schema, and for what `Direct` does not take.
GENERATION: Routes = {
    "/v1/chat/completions": (ChatRequest, chat_completions),
    "/v1/completions": (CompletionRequest, completions),
    "/v1/responses": (ResponsesRequest, responses),
}


def make_service(llm: "AsyncLLM", settings: ServerSettings) -> Service:
    name = settings.model_names[0]
    metrics = ServerMetrics(llm, name, settings.metrics_names == "vllm")
    service = Service(llm, settings, metrics, make_tracer(settings.otlp_traces_endpoint, name))
    metrics.http_open = lambda: service.num_requests
    return service


def make_app(service: Service) -> Any:
    """The ASGI application."""
    app = FastAPI(
        title="stoop",
        version=__version__,
        description="An OpenAI-compatible API",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    add_handlers(app, lambda: service.llm.state)
    _add_generation(app, service)
    _add_models(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    public = _add_page(app)
    gated: Any = Gate(Direct(app, service, GENERATION), service, public)
    if service.settings.allow_origins:
        gated = CORSMiddleware(
            gated,
            allow_origins=service.settings.allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return gated


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def _chat(request: Request, body: ChatRequest) -> Response:
        return await chat_completions(service, request, body)

    @app.post("/v1/completions", response_model=None)
    async def _completions(request: Request, body: CompletionRequest) -> Response:
        return await completions(service, request, body)

    @app.post("/v1/responses", response_model=None)
    async def _responses(request: Request, body: ResponsesRequest) -> Response:
        return await responses(service, request, body)


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "stoop",
            "root": service.model_name,
            "max_model_len": service.prompts.max_model_len,
        }

    @app.get("/v1/models")
    async def _models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in service.settings.model_names]}

    @app.get("/v1/models/{name:path}")
    async def _model(name: str) -> dict[str, Any]:
        return card(service.check_model(name))


def _add_tokens(app: FastAPI, service: Service) -> None:
    tokenizer = service.llm.tokenizer

    @app.post("/tokenize", response_model=None)
    async def _tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await service.prompts.token_ids(body.prompt, special)
        else:
            prompt = await service.prompts.render(
                plain_messages(body.messages or []),
                [tool.as_dict() for tool in body.tools or ()] or None,
                body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                special_tokens=bool(body.add_special_tokens),
            )
            ids = prompt.token_ids
        texts = None
        if body.return_token_strs:
            texts = await service.prompts.in_thread(
                lambda: [tokenizer.decode([each], False) for each in ids]
            )
        return json_response(
            {
                "count": len(ids),
                "max_model_len": service.prompts.max_model_len,
                "tokens": ids,
                "token_strs": texts,
            }
        )

    @app.post("/detokenize", response_model=None)
    async def _detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        size = service.llm.config.model.vocab_size
        for token in body.tokens:
            if token >= size:
                raise refuse(f"`tokens` has {token}: the model knows 0 to {size - 1}", "tokens")
        text = await service.prompts.in_thread(tokenizer.decode, body.tokens, False)
        return json_response({"prompt": text})


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=None)
    async def _health() -> Response:
        state = service.state
        if state == "ready":
            return JSONResponse({"status": "ready"})
        headers = {"retry-after": str(RETRY_AFTER)}
        body = {"status": state, **unavailable(state).body}
        return JSONResponse(body, 503, headers=headers)

    @app.get("/version")
    async def _version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/stats", response_model=None)
    async def _stats() -> Response:
        return json_response(service.stats())

    @app.get("/metrics", response_model=None)
    async def _metrics() -> Response:
        content, kind = service.metrics.render()
        return Response(content, media_type=kind)


def _add_page(app: FastAPI) -> tuple[str, ...]:
    """The chat page; returns its paths, which need no key."""
    routes = page.router()
    app.include_router(routes)
    return tuple(route.path for route in routes.routes if hasattr(route, "path"))
