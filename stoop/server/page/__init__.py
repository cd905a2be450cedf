"""The page at `/`: a chat that shows which tokens were drafts. Plain files, no build step."""

from functools import cache
from hashlib import sha256
from importlib.resources import files

from stoop.config.errors import ConfigError

try:
    from fastapi import APIRouter, Request, Response
except ImportError:
    raise ConfigError("the page needs fastapi: install it with pip install 'stoop[serve]'") from None

TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **{
        f"{name}.js": "text/javascript; charset=utf-8"
        for name in ("page", "api", "answer", "stats", "theme")
    },
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time, answered by 304 if nothing changed
}


@cache
def _content(name: str) -> tuple[bytes, str]:
    """A file and its entity tag."""
    content = files(__name__).joinpath(name).read_bytes()
    return content, f'"{sha256(content).hexdigest()[:16]}"'


def _answer(request: Request, name: str) -> Response:
    content, tag = _content(name)
    headers = HEADERS | {"ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[name], headers=headers)


def router() -> APIRouter:
    """Serves `/` and `/page/NAME`. These need no API key: the page asks for one."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def index(request: Request) -> Response:
        return _answer(request, "index.html")

    @routes.get("/page/{name}")
    async def asset(request: Request, name: str) -> Response:
        if name not in TYPES:
            return Response(status_code=404, headers=HEADERS)
        return _answer(request, name)

    return routes
