"""A short way past FastAPI for the routes that generate.

FastAPI's way from a request to its endpoint takes longer than all that stoop does there, and a
first token waits for it. Here a path is looked up and its body validated, no more. A request that
is anything but a good one goes to FastAPI, which says what is wrong with it: there is one set of
error messages, and one schema.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from stoop.server.errors import ClientGone, as_api_error
from stoop.server.service import Service
from stoop.server.transport import Message, Receive, Send

Endpoint = Callable[[Service, Request, Any], Awaitable[Response]]
Routes = dict[str, tuple[type[BaseModel], Endpoint]]  # by path; all are POST


class Direct:
    """ASGI middleware between the gate and the app.

    It expects the whole body in one message, which the gate sees to.
    """

    def __init__(self, app: Any, service: Service, routes: Routes) -> None:
        self.app = app
        self.service = service
        self.routes = routes

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        route = self.routes.get(scope.get("path", ""))
        if route is None or scope.get("method") != "POST" or not _is_json(scope["headers"]):
            await self.app(scope, receive, send)
            return
        model, endpoint = route
        message = await receive()
        try:
            body = model.model_validate(json.loads(message["body"]))
        except Exception:
            await self.app(scope, _again(message, receive), send)
            return
        try:
            response = await endpoint(self.service, Request(scope, receive), body)
            await response(scope, receive, send)
        except ClientGone:
            raise
        except Exception as error:
            found = as_api_error(error, self.service.llm.state)
            if found is None:  # a bug, which the gate logs
                raise
            raise found from None


def _is_json(headers: Any) -> bool:
    return any(name == b"content-type" and value == b"application/json" for name, value in headers)


def _again(message: Message, receive: Receive) -> Receive:
    """A `receive` that begins with this message."""
    waiting = [message]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
