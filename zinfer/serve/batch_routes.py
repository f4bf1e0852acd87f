"""OpenAI's routes for files and batches."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import APIRouter, Form, Query, Request, UploadFile
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from zinfer.requests.client_names import OpenBody
from zinfer.serve.batch import Batch
from zinfer.serve.batches import Batches
from zinfer.serve.body import described, read_model
from zinfer.serve.errors import ApiError
from zinfer.serve.file_store import FileStore, StoredFile

_MOST_LISTED: Final = 10_000
_Kept = TypeVar("_Kept", StoredFile, Batch)


class _BatchBody(OpenBody):
    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, Field(pattern="^24h$", description="'24h'")]
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None,
        Field(max_length=16, description="at most 16 pairs of texts, of 64 and 512 characters"),
    ] = None


class _Listed(BaseModel):
    """What a list of batches may be asked for."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class _ListedFiles(_Listed):
    limit: Annotated[int, Field(ge=1, le=_MOST_LISTED)] = _MOST_LISTED
    purpose: str | None = None


def file_routes(files: FileStore, batches: Batches) -> APIRouter:
    """Return the routes of files; those that a batch reads cannot be deleted."""
    router = APIRouter(prefix="/v1/files")

    @router.post("")
    async def upload(request: Request, file: UploadFile, purpose: Annotated[str, Form()]) -> StoredFile:
        for name in await request.form():
            if (field := name.partition("[")[0]) not in ("file", "purpose"):  # expires_after[seconds] is a part of one
                remedy = "leave it out; a file stays until it is deleted"
                raise ApiError(400, f"{field:.60} is not supported; {remedy}", param=field)
        if purpose != "batch":
            raise ApiError(400, f"purpose must be 'batch', not {purpose!r:.60}", param="purpose")
        return await files.add(file.file, (file.filename or "file")[:256], purpose)

    @router.get("")
    def listed(asked: Annotated[_ListedFiles, Query()]) -> dict[str, Any]:
        return _page(files.list(lambda file: asked.purpose in (None, file.purpose)), asked)

    @router.get("/{name}")
    def retrieve(name: str) -> StoredFile:
        return files.get(name)

    @router.get("/{name}/content")
    def content(name: str) -> FileResponse:
        return FileResponse(files.path(name), media_type="application/octet-stream")

    @router.delete("/{name}")
    async def delete(name: str) -> dict[str, Any]:  # on the event loop, as batches are created
        files.get(name)
        batches.check_unused(name)
        files.remove(name)
        return {"id": name, "object": "file", "deleted": True}

    return router


def batch_routes(batches: Batches) -> APIRouter:
    """Return the routes of batches."""
    router = APIRouter(prefix="/v1/batches")

    @router.post("", openapi_extra=described(_BatchBody))
    async def create(request: Request) -> Batch:
        body = await read_model(request, _BatchBody)
        return await batches.create(body.input_file_id, body.endpoint, body.completion_window, body.metadata)

    @router.get("")
    async def listed(asked: Annotated[_Listed, Query()]) -> dict[str, Any]:
        return _page(batches.list(), asked)

    @router.get("/{name}")
    async def retrieve(name: str) -> Batch:
        return batches.get(name)

    @router.post("/{name}/cancel")
    async def cancel(name: str) -> Batch:
        return await batches.cancel(name)

    return router


def _page(several: Sequence[_Kept], asked: _Listed) -> dict[str, Any]:
    """Return the part of a list, given with the newest first, that is asked for."""
    ordered = several if asked.order == "desc" else several[::-1]
    begin = 0
    if asked.after is not None:
        place = next((place for place, each in enumerate(ordered) if each.id == asked.after), None)
        if place is None:
            raise ApiError(400, f"after: there is none with the id {asked.after!r:.100}", param="after")
        begin = place + 1
    end = begin + asked.limit
    shown = ordered[begin:end]
    ids = {"first_id": shown[0].id if shown else None, "last_id": shown[-1].id if shown else None}
    return {"object": "list", "data": list(shown), **ids, "has_more": end < len(ordered)}
