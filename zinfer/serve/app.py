"""The HTTP application of a server."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from zinfer import __version__
from zinfer.serve.batch_routes import batch_routes, file_routes
from zinfer.serve.batches import Batches
from zinfer.serve.embedding_routes import embedding_routes
from zinfer.serve.ending import Ending
from zinfer.serve.errors import handle_errors
from zinfer.serve.file_store import FileStore
from zinfer.serve.guard import Guard
from zinfer.serve.lingering import Lingering
from zinfer.serve.mii_routes import mii_routes
from zinfer.serve.openai_routes import openai_routes
from zinfer.serve.operation_routes import operation_routes
from zinfer.serve.page_routes import page_routes
from zinfer.serve.replica_metrics import BatchMetrics
from zinfer.serve.score_routes import score_routes
from zinfer.serve.service import Service

MOST_BODY_BYTES: Final = 16 << 20
MOST_FILE_BYTES: Final = 512 << 20
FILE_QUOTA_BYTES: Final = 64 << 30


def make_app(
    service: Service,
    *,
    keys: Sequence[str],
    origins: Sequence[str],
    folder: Path | None,
    most_body_bytes: int = MOST_BODY_BYTES,
    most_file_bytes: int = MOST_FILE_BYTES,
    file_quota_bytes: int = FILE_QUOTA_BYTES,
) -> FastAPI:
    """Return the application.

    Args:
        service: started already; closed when the application ends.
        keys: API keys; none: everybody may call.
        origins: that browsers may call it from.
        most_body_bytes: larger bodies get 413.
        most_file_bytes: likewise of uploaded files.
        file_quota_bytes: of all files of one key.
        folder: for files and batches; None: there are no such routes.
    """
    batches: Batches | None = None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        if batches is not None:
            batches.start()
        yield
        if batches is not None:
            await batches.close()
        await service.close()

    told: dict[int | str, dict[str, Any]] = {"4XX": {"description": "An error in the form of OpenAI's"}}
    pages: dict[str, Any] = {"docs_url": None, "redoc_url": None}  # FastAPI's own, which load scripts from other hosts
    app = FastAPI(title="zinfer", version=__version__, lifespan=lifespan, responses=told, **pages)
    app.include_router(openai_routes(service))
    app.include_router(operation_routes(service))
    app.include_router(mii_routes(service))
    app.include_router(page_routes())
    app.include_router(score_routes(service))
    app.include_router(embedding_routes(service))
    if folder is not None:
        folder = folder.absolute()  # as messages name it, whose folders clients are not told
        files = FileStore(folder / "files", file_quota_bytes)
        batches = Batches(folder / "batches", service, files)
        service.metrics.add(BatchMetrics(service.names[0], batches.progress))
        app.include_router(file_routes(files, batches))
        app.include_router(batch_routes(batches))
    handle_errors(app)
    app.add_middleware(_Head)
    app.add_middleware(Ending)
    app.add_middleware(Guard, keys=keys, most_body_bytes=most_body_bytes, most_file_bytes=most_file_bytes)
    if origins:  # around the guard: a browser asks first without the key, and shows no refusal without the headers
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Lingering)
    return app


class _Head:
    """ASGI middleware: HEAD gets what GET does, without the body, which the HTTP server leaves out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)
