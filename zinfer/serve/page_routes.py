"""The server's own page, for a browser: static files that call the other routes."""

from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse

from zinfer.serve.errors import ApiError

_FOLDER: Final = Path(__file__).parent / "page"
_KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS: Final = {
    "Cache-Control": "no-cache",
    # What a model writes cannot become a program, and nothing comes from or goes to another host.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
PATH: Final = "/page/"


def page_routes() -> APIRouter:
    """Return the routes of the page's files; they hold nothing of this server and need no key."""
    router = APIRouter(include_in_schema=False)
    files = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _KINDS}

    @router.get("/")
    def page() -> FileResponse:
        return _answer(files["index.html"])

    @router.get("/docs")
    def docs() -> FileResponse:
        return _answer(files["docs.html"])

    @router.get(PATH + "{name}")
    def part(name: str) -> FileResponse:
        if name not in files:
            raise ApiError(404, f"the page has no file {name!r:.100}")
        return _answer(files[name])

    return router


def is_page(method: str, path: str) -> bool:
    """Whether a request is for a file of the page."""
    return method in ("GET", "HEAD") and (path in ("/", "/docs") or path.startswith(PATH))


def _answer(path: Path) -> FileResponse:
    return FileResponse(path, media_type=_KINDS[path.suffix], headers=_HEADERS)
