"""The page at `/`: a chat that shows which tokens were drafts. Plain files, no build step."""

from functools import cache, partial
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response

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
    """Serves `/` and the files under `/page/`. These need no API key: the page asks for one."""
    routes = APIRouter(include_in_schema=False)
    for name in TYPES:
        path = "/" if name == "index.html" else f"/page/{name}"
        routes.add_api_route(path, partial(_answer, name=name), methods=["GET"])
    return routes
