"""The HTTP application of a server."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from zinfer import __version__
from zinfer.serve.errors import handle_errors
from zinfer.serve.guard import Guard
from zinfer.serve.openai_routes import openai_routes
from zinfer.serve.operation_routes import operation_routes
from zinfer.serve.service import Service


def make_app(
    service: Service, *, keys: Sequence[str], origins: Sequence[str], root_path: str, most_body_bytes: int
) -> FastAPI:
    """Return the application.

    Args:
        service: started already; closed when the application ends.
        keys: API keys; none: everybody may call.
        origins: that browsers may call it from.
        root_path: prefix that a proxy strips.
        most_body_bytes: larger bodies get 413.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await service.close()

    app = FastAPI(title="zinfer", version=__version__, lifespan=lifespan, root_path=root_path)
    app.include_router(openai_routes(service))
    app.include_router(operation_routes(service))
    handle_errors(app)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=most_body_bytes)
    app.add_middleware(Guard, keys=keys, most_body_bytes=most_body_bytes)
    return app
