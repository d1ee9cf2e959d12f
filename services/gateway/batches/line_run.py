"""One line of a batch, run as the request of its tenant that it is: admitted, queued, charged and placed as any other.

It is of the batch class whatever its body says. Its idempotency key is the batch's id and its number, so that a line
whose gateway dies is read on from the worker that has it, and a line that is run anew draws the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from services.gateway.api.edge import as_gateway_error
from services.gateway.api.openai_whole import reply_of, whole_answer
from services.gateway.batches.input_lines import InputLine
from services.gateway.batches.layout import line_id
from services.gateway.batches.records import BatchRecord
from services.gateway.core import Core
from services.gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    InternalError,
    InvalidRequest,
    ModelUnavailable,
    Overloaded,
    TenantLimitExceeded,
    TooLargeForWorkers,
    WorkerFailed,
    openai_body,
    shape_of,
)
from services.gateway.planning import Tenant
from services.gateway.session import OK, Session

# The line waits and is tried again while its batch lives; of the second kind, so many times.
_REFUSALS = (Overloaded, TenantLimitExceeded, ModelUnavailable)
_FAILURES = (WorkerFailed, DeadlineExceeded, InternalError, TooLargeForWorkers)
MAX_FAILURES = 5
_encode = msgspec.json.encode


class _Streamed(msgspec.Struct, frozen=True):
    stream: bool | None = None


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """status: of HTTP. body: the JSON object that a client would have got."""

    status: int
    request_id: str
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Whether it is an answer and no error."""
        return self.status == 200


@dataclass(slots=True, eq=False)
class LineRun:
    """One attempt to run a line. abandons: when it is cancelled, nobody will come back for what it has begun."""

    core: Core
    record: BatchRecord
    number: int
    abandons: bool = False

    async def answer(self, line: InputLine) -> LineAnswer:
        """Raises GatewayError where it may be tried again: see `is_refusal` and `is_failure`."""
        record = self.record
        session: Session | None = None
        try:
            _check_body(bytes(line.body))
            tenant = Tenant(record.tenant, record.tenant_generation)
            session = self.core.open_offline(record.api, tenant, f"{record.id}:{self.number}")
            begun = await self.core.beginner.begin_openai(session, record.api, bytes(line.body))
            body = await whole_answer(session, begun, reply_of(self.core.catalog, session, begun))
            session.close(OK)
            return LineAnswer(200, session.request_id, body)
        except asyncio.CancelledError:
            if session is not None:
                session.abandon() if self.abandons else session.close()
            raise
        except Exception as error:
            known = as_gateway_error(error)
            if session is not None:
                session.fail(known)
            if is_refusal(known) or is_failure(known):
                raise known from None
            return error_answer(known, session.request_id if session is not None else "")


def is_refusal(error: GatewayError) -> bool:
    """Nothing was computed, and another time it may be."""
    return isinstance(error, _REFUSALS) and not is_failure(error)


def is_failure(error: GatewayError) -> bool:
    """The run came to nothing; the next one may come to something."""
    return isinstance(error, _FAILURES)


def error_answer(error: GatewayError, request_id: str) -> LineAnswer:
    """What a client would have got."""
    return LineAnswer(shape_of(error).http_status, request_id, openai_body(error).encode())


def result_line(record: BatchRecord, number: int, custom_id: str, answer: LineAnswer) -> bytes:
    """The line of the file of results, or of the file of errors."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    return _encode({"id": line_id(record.id, number), "custom_id": custom_id, "response": response, "error": None})


def unanswered_line(record: BatchRecord, number: int, custom_id: str, code: str, message: str) -> bytes:
    """The line of the file of errors for one that was never answered."""
    error = {"code": code, "message": message}
    return _encode({"id": line_id(record.id, number), "custom_id": custom_id, "response": None, "error": error})


def _check_body(body: bytes) -> None:
    """Raise InvalidRequest for what only a client that listens can have."""
    try:
        streamed = msgspec.json.decode(body, type=_Streamed).stream
    except (msgspec.DecodeError, RecursionError):
        # Whatever is wrong with it is told where it is parsed as a request.
        return
    if streamed:
        raise InvalidRequest("a line of a batch cannot be streamed", "stream")
