"""Errors of the gateway, and the one table from each to its gRPC status and OpenAI error body.

GatewayError
├── InvalidRequest                 the caller's mistake
│   ├── UnsupportedParameter       a known field that is not implemented
│   ├── ContextLengthExceeded      prompt (and output) do not fit the model
│   ├── FileTooLarge               beyond the limit of one file
│   └── StorageQuotaExceeded       this tenant's files take all the room that they may
├── ObjectNotFound                 no such file or batch of this tenant
├── StateConflict                  the batch is over already
├── FilesNotServed                 this mesh has no directory for files
├── StorageFailed                  that directory cannot be read or written
├── AuthenticationFailed
├── RequestIdInUse                 another request in flight here has the id that the caller gave
├── IdempotencyKeyReused           the key belongs to another request
├── ModelNotFound
├── TenantLimitExceeded            this tenant has too much in flight or waiting, or has used up a quota
├── Overloaded                     the gateway or every worker is full
│   ├── Draining                   the gateway ends; another one may take the request
│   ├── WorkersFull                every worker is, at this moment
│   └── ObjectiveUnmet             no worker would answer in the time that the request allows
├── ModelUnavailable               known, and nobody serves it now
│   ├── ModelLoading               it is loaded on demand, and the request cannot wait for that
│   └── TooLargeForWorkers         nobody who serves it has room for the request, now or later
├── DeadlineExceeded
├── WorkerFailed                   a worker was lost and the request with it
│   └── AnswerNotKept              no worker has the answer that is to be repeated
└── InternalError                  our own bug
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from services.common.rpc import ELSEWHERE_METADATA

ERROR_METADATA = "x-openai-error"
RETRY_METADATA = "retry-after"
_MAX_MESSAGE_CHARACTERS = 1000


class GatewayError(Exception):
    """Base: `message` is for the caller, `param` names the field at fault. Survives pickling."""

    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param, retry_after_s)
        self.message = message[:_MAX_MESSAGE_CHARACTERS]
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(GatewayError):
    """The request cannot be served as it is."""


class UnsupportedParameter(InvalidRequest):
    """A field of the API that this mesh does not implement."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together exceed the model's context."""


class FileTooLarge(InvalidRequest):
    """A file is beyond the limit of one."""


class StorageQuotaExceeded(InvalidRequest):
    """The tenant's files take all the room, or are as many, as they may."""


class ObjectNotFound(GatewayError):
    """The tenant has no file or batch of that id."""


class StateConflict(GatewayError):
    """What is asked of a batch comes too late."""


class FilesNotServed(GatewayError):
    """No directory for files is set."""


class StorageFailed(GatewayError):
    """The directory of files cannot be read or written at the moment."""


class AuthenticationFailed(GatewayError):
    """No API key, or an unknown one."""


class RequestIdInUse(GatewayError):
    """A request with this id is in flight."""


class IdempotencyKeyReused(GatewayError):
    """The key belongs to a request with another body."""


class ModelNotFound(GatewayError):
    """No model of that name."""


class TenantLimitExceeded(GatewayError):
    """The tenant's share of requests in flight or waiting, or one of its quotas, is used up."""


class Overloaded(GatewayError):
    """Nobody can take the request now."""


class Draining(Overloaded):
    """This gateway takes no more requests; nothing of this one was begun."""


class WorkersFull(Overloaded):
    """No worker has room at this moment; the request may wait for it. room_in_s: when one is expected, 0: unknown."""

    room_in_s: float = 0.0


class ObjectiveUnmet(Overloaded):
    """No worker would meet the request's objectives or its deadline."""


class ModelUnavailable(GatewayError):
    """The model is known and no replica serves it."""


class ModelLoading(ModelUnavailable):
    """A model that is loaded when it is asked for would not be there in time, or too many wait."""


class TooLargeForWorkers(ModelUnavailable):
    """No worker of the model has room for the prompt and its whole output, whatever else it has."""


class DeadlineExceeded(GatewayError):
    """The request's time is over."""


class WorkerFailed(GatewayError):
    """The worker was lost in the middle of the answer, or several failed before it."""


class AnswerNotKept(WorkerFailed):
    """No worker keeps the answer of an earlier request with this key; the caller of it runs the request anew."""


class InternalError(GatewayError):
    """A bug of ours; the message says nothing of it."""


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How one error looks outside."""

    status: str  # name of a gRPC status
    http_status: int
    type: str
    code: str | None
    retry_after_s: float | None = None


_TABLE: dict[type[GatewayError], ErrorShape] = {
    UnsupportedParameter: ErrorShape("INVALID_ARGUMENT", 400, "invalid_request_error", "unsupported_parameter"),
    ContextLengthExceeded: ErrorShape("INVALID_ARGUMENT", 400, "invalid_request_error", "context_length_exceeded"),
    FileTooLarge: ErrorShape("INVALID_ARGUMENT", 400, "invalid_request_error", "file_too_large"),
    StorageQuotaExceeded: ErrorShape("INVALID_ARGUMENT", 400, "invalid_request_error", "storage_quota_exceeded"),
    InvalidRequest: ErrorShape("INVALID_ARGUMENT", 400, "invalid_request_error", None),
    AuthenticationFailed: ErrorShape("UNAUTHENTICATED", 401, "invalid_request_error", "invalid_api_key"),
    RequestIdInUse: ErrorShape("ALREADY_EXISTS", 409, "invalid_request_error", "request_id_in_use"),
    IdempotencyKeyReused: ErrorShape("ALREADY_EXISTS", 409, "invalid_request_error", "idempotency_key_reused"),
    ModelNotFound: ErrorShape("NOT_FOUND", 404, "invalid_request_error", "model_not_found"),
    ObjectNotFound: ErrorShape("NOT_FOUND", 404, "invalid_request_error", "not_found"),
    StateConflict: ErrorShape("ABORTED", 409, "invalid_request_error", "state_conflict"),
    FilesNotServed: ErrorShape("UNIMPLEMENTED", 501, "invalid_request_error", "files_not_served"),
    StorageFailed: ErrorShape("UNAVAILABLE", 503, "server_error", "storage_unavailable", 1.0),
    TenantLimitExceeded: ErrorShape("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded", 1.0),
    Overloaded: ErrorShape("UNAVAILABLE", 503, "server_error", "overloaded", 1.0),
    ObjectiveUnmet: ErrorShape("UNAVAILABLE", 503, "server_error", "objective_unmet", 1.0),
    ModelUnavailable: ErrorShape("UNAVAILABLE", 503, "server_error", "model_unavailable", 1.0),
    ModelLoading: ErrorShape("UNAVAILABLE", 503, "server_error", "model_loading", 1.0),
    DeadlineExceeded: ErrorShape("DEADLINE_EXCEEDED", 504, "server_error", "deadline_exceeded"),
    WorkerFailed: ErrorShape("UNAVAILABLE", 503, "server_error", "worker_failed", 1.0),
    InternalError: ErrorShape("INTERNAL", 500, "server_error", "internal_error"),
}


def shape_of(error: GatewayError) -> ErrorShape:
    """The row of the nearest class of `error` in the table."""
    return next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)


def openai_body(error: GatewayError) -> str:
    """The OpenAI error body as ASCII JSON."""
    shape = shape_of(error)
    inner = {"message": error.message, "type": shape.type, "param": error.param, "code": shape.code}
    return json.dumps({"error": inner}, separators=(",", ":"))


def trailing_metadata(error: GatewayError) -> tuple[tuple[str, str], ...]:
    """What travels beside the gRPC status: the OpenAI body and, where a retry helps, whole seconds to wait.

    What another gateway could take at once is marked for Envoy.
    """
    shape = shape_of(error)
    metadata = [(ERROR_METADATA, openai_body(error))]
    retry_after_s = error.retry_after_s if error.retry_after_s is not None else shape.retry_after_s
    if shape.retry_after_s is not None and retry_after_s is not None:
        metadata.append((RETRY_METADATA, str(max(1, math.ceil(retry_after_s)))))
    if isinstance(error, Draining):
        metadata.append((ELSEWHERE_METADATA, "1"))
    return tuple(metadata)
