"""What is written down of files and batches, each record once, and their objects in OpenAI's API. Plain data.

Times are whole Unix seconds.
"""

from __future__ import annotations

from typing import Any

import msgspec

BATCH, BATCH_OUTPUT = "batch", "batch_output"
ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
# Of a batch that is over.
COMPLETED, FAILED, EXPIRED, CANCELLED = "completed", "failed", "expired", "cancelled"
VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is complete. expires_at: None for never."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def is_expired(self, now_s: float) -> bool:
        """now_s: Unix time."""
        return self.expires_at is not None and now_s >= self.expires_at

    def as_object(self) -> dict[str, Any]:
        """For the API."""
        return {"object": "file", "status": "processed", **msgspec.structs.asdict(self)}


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a client has asked for. tenant_generation: of the key that it was asked with."""

    id: str
    tenant: str
    tenant_generation: int
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None

    @property
    def api(self) -> str:
        """The gateway's name of its endpoint."""
        return ENDPOINTS[self.endpoint]


class Mark(msgspec.Struct, frozen=True):
    """That a batch has come to something."""

    at: int


class Checked(msgspec.Struct, frozen=True):
    """Its lines are in order. total: how many there are."""

    at: int
    total: int


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with a batch. line: counted from 1, None for the whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchUsage(msgspec.Struct, frozen=True):
    """Tokens of all answers together."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def as_object(self) -> dict[str, Any]:
        """For the API."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class Final(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch has ended. failed: lines without an answer of status 200, those that were never run included."""

    status: str
    at: int
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[LineError] = []
    usage: BatchUsage = BatchUsage()


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of a batch. completed, failed: lines so far."""

    record: BatchRecord
    checked: Checked | None = None
    finalizing: Mark | None = None
    cancelling: Mark | None = None
    final: Final | None = None
    completed: int = 0
    failed: int = 0

    @property
    def status(self) -> str:
        """As the API calls it."""
        if self.final is not None:
            return self.final.status
        if self.cancelling is not None:
            return CANCELLING
        if self.finalizing is not None:
            return FINALIZING
        return IN_PROGRESS if self.checked is not None else VALIDATING

    def as_object(self) -> dict[str, Any]:
        """For the API."""
        record, final = self.record, self.final
        return {
            "id": record.id,
            "object": "batch",
            "endpoint": record.endpoint,
            "errors": _errors(final.errors) if final is not None else None,
            "input_file_id": record.input_file_id,
            "completion_window": record.completion_window,
            "status": self.status,
            "output_file_id": final.output_file_id if final is not None else None,
            "error_file_id": final.error_file_id if final is not None else None,
            "created_at": record.created_at,
            "in_progress_at": _at(self.checked),
            "expires_at": record.expires_at,
            "finalizing_at": _at(self.finalizing),
            "cancelling_at": _at(self.cancelling),
            **{f"{status}_at": self._ended_at(status) for status in (COMPLETED, FAILED, EXPIRED, CANCELLED)},
            "request_counts": self._counts(),
            "usage": final.usage.as_object() if final is not None else None,
            "metadata": record.metadata,
        }

    def _ended_at(self, status: str) -> int | None:
        return self.final.at if self.final is not None and self.final.status == status else None

    def _counts(self) -> dict[str, int]:
        if self.final is not None:
            return {"total": self.final.total, "completed": self.final.completed, "failed": self.final.failed}
        total = self.checked.total if self.checked is not None else 0
        return {"total": total, "completed": self.completed, "failed": self.failed}


def _at(mark: Mark | Checked | None) -> int | None:
    return mark.at if mark is not None else None


def _errors(errors: list[LineError]) -> dict[str, Any] | None:
    return {"object": "list", "data": [msgspec.structs.asdict(error) for error in errors]} if errors else None
