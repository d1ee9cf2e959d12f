"""What clients may ask of files and batches: fields checked, defaults filled in. Pure; every mistake is one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from services.gateway.batches.layout import new_batch_id
from services.gateway.batches.records import BATCH, ENDPOINTS, BatchRecord, FileRecord
from services.gateway.errors import InvalidRequest, ObjectNotFound, UnsupportedParameter
from services.gateway.planning import Tenant

WINDOW, WINDOW_S = "24h", 86_400
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_LEAST_LIFE_S, _MOST_LIFE_S = 3600, 2_592_000
_DEFAULT_FILES, _MOST_FILES = 10_000, 10_000
_DEFAULT_BATCHES, _MOST_BATCHES = 20, 100
R = TypeVar("R", FileRecord, BatchRecord)


class _BatchBody(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    # Known and not implemented.
    output_expires_after: Any = None


def new_batch(body: bytes, tenant: Tenant, now_s: float) -> BatchRecord:
    """The batch that a body asks for. now_s: Unix time. Raises InvalidRequest."""
    try:
        given = msgspec.json.decode(body, type=_BatchBody)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("the body is not valid JSON") from None
    if given.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if given.completion_window != WINDOW:
        raise InvalidRequest(f"completion_window must be {WINDOW}", "completion_window")
    if given.output_expires_after is not None:
        raise UnsupportedParameter("output_expires_after is not supported", "output_expires_after")
    _check_metadata(given.metadata or {})
    return BatchRecord(
        id=new_batch_id(),
        tenant=tenant.name,
        tenant_generation=tenant.generation,
        endpoint=given.endpoint,
        input_file_id=given.input_file_id,
        completion_window=given.completion_window,
        created_at=int(now_s),
        expires_at=int(now_s) + WINDOW_S,
        metadata=given.metadata,
    )


def upload_life_s(fields: Mapping[str, str], default_s: float) -> float:
    """How long an uploaded file stays. Raises InvalidRequest for a form that asks for what is not served."""
    purpose = fields.get("purpose", "")
    if purpose != BATCH:
        raise InvalidRequest(f"purpose must be {BATCH!r}, the one that is served", "purpose")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        raise InvalidRequest("expires_after.anchor must be created_at", "expires_after.anchor")
    if seconds is None or not seconds.isdecimal() or not _LEAST_LIFE_S <= int(seconds) <= _MOST_LIFE_S:
        raise InvalidRequest(
            f"expires_after.seconds must be between {_LEAST_LIFE_S} and {_MOST_LIFE_S}", "expires_after.seconds"
        )
    return float(seconds)


def file_limit(limit: int) -> int:
    """Files of a page. limit: as given, 0 for none. Raises InvalidRequest."""
    return _limit(limit, _DEFAULT_FILES, _MOST_FILES)


def batch_limit(limit: int) -> int:
    """Batches of a page."""
    return _limit(limit, _DEFAULT_BATCHES, _MOST_BATCHES)


def page(records: Sequence[R], after: str, limit: int) -> tuple[Sequence[R], bool]:
    """The records that follow the one called `after`, and whether there are more. Raises ObjectNotFound."""
    start = 0
    if after:
        start = next((i + 1 for i, record in enumerate(records) if record.id == after), 0)
        if not start:
            raise ObjectNotFound(f"No such object: {after[:64]}", "after")
    return records[start : start + limit], len(records) > start + limit


def page_object(objects: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page for the API."""
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }


def _limit(given: int, default: int, most: int) -> int:
    if not 0 <= given <= most:
        raise InvalidRequest(f"limit must be between 1 and {most}", "limit")
    return given or default


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise InvalidRequest(f"metadata has at most {_MAX_METADATA} pairs", "metadata")
    for key, value in metadata.items():
        if not (len(key) <= _MAX_KEY and len(value) <= _MAX_VALUE):
            raise InvalidRequest(
                f"a key of metadata has at most {_MAX_KEY} characters, a value {_MAX_VALUE}", "metadata"
            )
