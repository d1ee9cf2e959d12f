"""Replies that are not a gateway's own, in the shape of OpenAI's errors: one table for both places that write them.

The Lua filter shapes what passes the filter chain; the local reply configuration covers what does not (a request
refused before the chain exists) and gives native gRPC callers plain text, since Envoy makes `grpc-message` from the
body.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from envoy.config.accesslog.v3 import accesslog_pb2
from envoy.config.core.v3 import base_pb2, substitution_format_string_pb2
from envoy.config.route.v3 import route_components_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from envoy.type.matcher.v3 import string_pb2

RETRY_AFTER_S = 1
# The transcoder sets it; a request with it is an HTTP client's though its content type has become gRPC by then.
_TRANSCODED_HEADER = "x-envoy-original-path"


@dataclass(frozen=True, slots=True)
class LocalReply:
    """The body of one status."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    retry: bool = False

    @property
    def body(self) -> str:
        """The OpenAI error as JSON."""
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":"))


LOCAL_REPLIES = (
    LocalReply(400, "The request is malformed."),
    LocalReply(404, "There is no such path; the API is under /v1."),
    LocalReply(408, "The request did not arrive in time.", type="timeout_error"),
    LocalReply(413, "The request body is too large.", code="request_too_large"),
    LocalReply(426, "This version of HTTP is not supported."),
    LocalReply(431, "The request headers are too large.", code="request_too_large"),
    LocalReply(499, "The request was cancelled.", type="cancelled_error"),
    LocalReply(501, "This is not supported."),
    LocalReply(429, "Too many requests.", type="rate_limit_error", code="rate_limit_exceeded", retry=True),
    LocalReply(
        503,
        "The service is unavailable; retry shortly.",
        type="overloaded_error",
        code="service_unavailable",
        retry=True,
    ),
    LocalReply(504, "The deadline of the request has passed.", type="timeout_error", code="deadline_exceeded"),
)
_REFUSED = LocalReply(0, "The request was refused.")
_FAILED = LocalReply(0, "The service failed to answer.", type="server_error")


def local_reply_config() -> http_connection_manager_pb2.LocalReplyConfig:
    """Mappers in order: native gRPC callers, then one for each status, then the general body."""
    return http_connection_manager_pb2.LocalReplyConfig(
        mappers=[_native_grpc(), *(_mapper(reply) for reply in LOCAL_REPLIES)],
        body_format=_json(_FAILED.body),
    )


def lua_tables() -> str:
    """The bodies as the Lua filter reads them."""
    rows = [f'  ["{reply.status}"] = {_lua_string(reply.body)},' for reply in LOCAL_REPLIES]
    return "\n".join(
        (
            *("local BODIES = {", *rows, "}"),
            f"local REFUSED = {_lua_string(_REFUSED.body)}",
            f"local FAILED = {_lua_string(_FAILED.body)}\n",
        )
    )


def _lua_string(text: str) -> str:
    assert "]==]" not in text
    return f"[==[{text}]==]"


def _json(body: str) -> substitution_format_string_pb2.SubstitutionFormatString:
    return substitution_format_string_pb2.SubstitutionFormatString(
        text_format_source=base_pb2.DataSource(inline_string=body), content_type="application/json"
    )


def _mapper(reply: LocalReply) -> http_connection_manager_pb2.ResponseMapper:
    mapper = http_connection_manager_pb2.ResponseMapper(
        filter=_status_is(reply.status), body_format_override=_json(reply.body)
    )
    if reply.retry:
        mapper.headers_to_add.append(_retry_after())
    return mapper


def _native_grpc() -> http_connection_manager_pb2.ResponseMapper:
    grpc_request = route_components_pb2.HeaderMatcher(
        name="content-type", string_match=string_pb2.StringMatcher(prefix="application/grpc")
    )
    transcoded = route_components_pb2.HeaderMatcher(name=_TRANSCODED_HEADER, present_match=True, invert_match=True)
    return http_connection_manager_pb2.ResponseMapper(
        filter=accesslog_pb2.AccessLogFilter(
            and_filter=accesslog_pb2.AndFilter(
                filters=[
                    accesslog_pb2.AccessLogFilter(header_filter=accesslog_pb2.HeaderFilter(header=matcher))
                    for matcher in (grpc_request, transcoded)
                ]
            )
        ),
        body_format_override=substitution_format_string_pb2.SubstitutionFormatString(
            text_format_source=base_pb2.DataSource(inline_string="%LOCAL_REPLY_BODY%"), content_type="text/plain"
        ),
    )


def _status_is(status: int) -> accesslog_pb2.AccessLogFilter:
    comparison = accesslog_pb2.ComparisonFilter(
        op=accesslog_pb2.ComparisonFilter.EQ,
        value=base_pb2.RuntimeUInt32(default_value=status, runtime_key=f"kvmesh.local_reply.{status}"),
    )
    return accesslog_pb2.AccessLogFilter(status_code_filter=accesslog_pb2.StatusCodeFilter(comparison=comparison))


def _retry_after() -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key="retry-after", value=str(RETRY_AFTER_S)),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
