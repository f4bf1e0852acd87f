"""`Batch`: what OpenAI's interface shows of a batch."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

URLS: Final = ("/v1/chat/completions", "/v1/completions")
UNFINISHED: Final = ("validating", "in_progress", "finalizing", "cancelling")


class Batch(BaseModel):
    """A batch as OpenAI's interface shows it; times are seconds since the epoch.

    owner: who has begun it, as `CALLER`; kept, and not shown.
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: dict[str, int] = {"total": 0, "completed": 0, "failed": 0}
    metadata: dict[str, str] | None = None
    owner: Annotated[str, Field(exclude=True)] = ""

    @property
    def is_unfinished(self) -> bool:
        """Whether it waits, is computed or is about to end."""
        return self.status in UNFINISHED

    @property
    def is_whole(self) -> bool:
        """Whether all rows are computed."""
        counts = self.request_counts
        return counts["total"] == counts["completed"] + counts["failed"] > 0
