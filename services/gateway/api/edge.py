"""What both servicers do with a gRPC context: read its metadata, send headers, turn errors into statuses."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from services.common.rpc import REQUEST_ID_METADATA
from services.gateway.errors import GatewayError, InternalError, shape_of, trailing_metadata
from services.gateway.session import Session

Context = grpc.aio.ServicerContext[Any, Any]
_log = structlog.get_logger("gateway.api")


def metadata_of(context: Context) -> Mapping[str, str]:
    """The call's text metadata; of a repeated key the last value."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def as_gateway_error(error: Exception) -> GatewayError:
    """The error itself, or InternalError for a bug; the log gets the places it came through, never its text."""
    if isinstance(error, GatewayError):
        return error
    frames = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    _log.error("unexpected_error", error=type(error).__name__, frames=frames[-8:])
    return InternalError("internal error")


def on_end(context: Context, session: Session) -> None:
    """Close the session when the call has ended in whatever way, the client's disconnect included."""

    def close(_: object) -> None:
        session.close()

    context.add_done_callback(close)  # type: ignore[arg-type]


async def abort(context: Context, error: GatewayError, session: Session | None = None) -> NoReturn:
    """End the call with the error's status and trailing metadata; session: of the request, where it has begun."""
    metadata = trailing_metadata(error)
    if session is not None:
        metadata = (*metadata, (REQUEST_ID_METADATA, session.request_id))
    await context.abort(grpc.StatusCode[shape_of(error).status], error.message, metadata)
    raise AssertionError("abort returned")


async def send_headers(context: Context, session: Session, worker_id: str, cached_tokens: int) -> None:
    """The initial metadata of an admitted request."""
    headers = [
        (REQUEST_ID_METADATA, session.request_id),
        ("x-kvmesh-worker", worker_id),
        ("x-kvmesh-cached-tokens", str(cached_tokens)),
    ]
    if session.idempotency_key is not None:
        headers.append(("x-kvmesh-run", session.replay_of or session.run_id))
    if session.replay_of:
        headers.append(("x-kvmesh-replayed", "true"))
    if session.cold_start_s:
        headers.append(("x-kvmesh-cold-start-s", f"{session.cold_start_s:.1f}"))
    if session.traceparent:
        headers.append(("traceparent", session.traceparent))
    await context.send_initial_metadata(tuple(headers))
