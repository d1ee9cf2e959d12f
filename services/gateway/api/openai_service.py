"""The OpenAI servicer: bodies in, bodies or server-sent events out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from kvmesh.v1.inference_pb2 import ModelInfo, ModelVersionInfo
from kvmesh.v1.openai_pb2 import GetModelRequest
from kvmesh.v1.openai_pb2_grpc import OpenAIServicer

from services.gateway.api.edge import Context, abort, as_gateway_error, metadata_of, on_end, send_headers
from services.gateway.api.event_outlet import EventOutlet
from services.gateway.api.openai_embeddings import EMBEDDINGS
from services.gateway.api.openai_parse import CHAT, COMPLETIONS
from services.gateway.api.openai_render import JSON, StreamRenderer, encode, error_event
from services.gateway.api.openai_whole import reply_of, whole_answer, whole_embeddings
from services.gateway.beginning import Begun
from services.gateway.core import Core
from services.gateway.errors import GatewayError, ModelUnavailable
from services.gateway.output import Accepted, Delta, Event, Finish
from services.gateway.request import Sampling
from services.gateway.session import OK, Session

# Of one message of a reply: well below the 4 MiB that clients of gRPC take by themselves.
_PART_BYTES = 2**20


class OpenAIService(OpenAIServicer):
    """Translates between HttpBody and the core."""

    def __init__(self, core: Core, *, heartbeat_s: float) -> None:
        self._core = core
        self._heartbeat_s = heartbeat_s

    async def ChatCompletions(self, request: HttpBody, context: Context) -> AsyncIterator[HttpBody]:
        """POST /v1/chat/completions."""
        async for message in self._complete(CHAT, request, context):
            yield message

    async def Completions(self, request: HttpBody, context: Context) -> AsyncIterator[HttpBody]:
        """POST /v1/completions."""
        async for message in self._complete(COMPLETIONS, request, context):
            yield message

    async def Embeddings(self, request: HttpBody, context: Context) -> AsyncIterator[HttpBody]:
        """POST /v1/embeddings."""
        session: Session | None = None
        try:
            session = self._core.open(EMBEDDINGS, metadata_of(context), context.time_remaining())
            on_end(context, session)
            begun = await self._core.beginner.begin_openai(session, EMBEDDINGS, request.data)
            # Headers leave when it is sure that there will be a reply.
            data, accepted = await whole_embeddings(session, begun)
            await send_headers(context, session, accepted.worker_id, accepted.cached_tokens)
            for part in _parts(data):
                yield part
            session.close(OK)
        except Exception as error:
            known = as_gateway_error(error)
            if session is not None:
                session.fail(known)
            await abort(context, known, session)

    async def ListModels(self, request: Empty, context: Context) -> HttpBody:
        """GET /v1/models."""
        await self._authenticate(context)
        models = [self._model_object(info) for info in self._core.listing.infos()]
        return _json({"object": "list", "data": models})

    def _model_object(self, info: ModelInfo) -> dict[str, Any]:
        return _model_object(info, self._core.catalog.text_model(info.alias_of or info.name).sampling_defaults)

    async def GetModel(self, request: GetModelRequest, context: Context) -> HttpBody:
        """GET /v1/models/{id}."""
        await self._authenticate(context)
        try:
            return _json(self._model_object(self._core.listing.info(request.id)))
        except GatewayError as error:
            await abort(context, error)

    async def Healthz(self, request: Empty, context: Context) -> HttpBody:
        """GET /healthz: this process answers."""
        return _json({"status": "alive"})

    async def Readyz(self, request: Empty, context: Context) -> HttpBody:
        """GET /readyz: a request would be served."""
        if self._core.admission.draining or not self._core.catalog.is_ready:
            await abort(context, ModelUnavailable("no model has a ready replica"))
        return _json({"status": "ready"})

    async def _authenticate(self, context: Context) -> None:
        try:
            self._core.tenant(metadata_of(context))
        except GatewayError as error:
            await abort(context, error)

    async def _complete(self, endpoint: str, request: HttpBody, context: Context) -> AsyncIterator[HttpBody]:
        session: Session | None = None
        try:
            session = self._core.open(endpoint, metadata_of(context), context.time_remaining())
            on_end(context, session)
            begun = await self._core.beginner.begin_openai(session, endpoint, request.data)
            reply = reply_of(self._core.catalog, session, begun)
            if not reply.format.stream:

                async def on_accepted(event: Accepted) -> None:
                    assert session is not None
                    await send_headers(context, session, event.worker_id, event.cached_tokens)

                for part in _parts(await whole_answer(session, begun, reply, on_accepted)):
                    yield part
            else:
                await self._stream(session, begun, StreamRenderer(reply), context)
            session.close(OK)
        except Exception as error:
            known = as_gateway_error(error)
            if session is not None:
                session.fail(known)
            await abort(context, known, session)

    async def _stream(self, session: Session, begun: Begun, renderer: StreamRenderer, context: Context) -> None:
        """Write the events; errors after the first one end in an error event."""
        generation, events = begun.generation, begun.events
        accepted = events[0]
        assert isinstance(accepted, Accepted)
        await send_headers(context, session, accepted.worker_id, accepted.cached_tokens)
        pulse = self._core.placement.pulse
        outlet = EventOutlet(context, pulse, heartbeat_s=self._heartbeat_s)
        await outlet.flush(renderer.opening())
        pulse.add(outlet)
        try:
            while events:
                data = _render(events, renderer)
                if data:
                    if session.first_output_s:
                        await outlet.send(data)
                    else:
                        await outlet.flush(data)
                    session.output_seen()
                events = await generation.read()
            ending = renderer.ending(generation.usage())
        except Exception as error:
            known = as_gateway_error(error)
            session.fail(known)
            ending = error_event(known)
        finally:
            pulse.discard(outlet)
        await outlet.flush(ending)


def _render(events: list[Event], renderer: StreamRenderer) -> bytes:
    if len(events) == 1 and type(events[0]) is Delta:
        return renderer.delta(events[0])
    parts = [
        renderer.delta(event) if isinstance(event, Delta) else renderer.finish(event)
        for event in events
        if isinstance(event, Delta | Finish)
    ]
    return b"".join(parts)


def _parts(data: bytes) -> Iterator[HttpBody]:
    """A body as messages that every hop takes, whatever its size."""
    for start in range(0, len(data), _PART_BYTES):
        yield HttpBody(content_type=JSON, data=data[start : start + _PART_BYTES])


def _json(value: Any) -> HttpBody:
    return HttpBody(content_type=JSON, data=encode(value))


def _version_object(version: ModelVersionInfo) -> dict[str, Any]:
    return {
        "version": version.version or None,
        "digest": version.digest,
        "share": round(version.share, 6),
        "ready_replicas": version.ready_replicas,
        "weight_format": version.weight_format,
        "dtype": version.dtype,
    }


def _model_object(info: ModelInfo, defaults: Sampling) -> dict[str, Any]:
    adapter = {"parent": info.parent, "adapter_digest": info.adapter_digest, "adapter_rank": info.adapter_rank}
    return {
        "id": info.name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "kvmesh",
        **({"parent": info.parent} if info.parent else {}),
        "kvmesh": {
            "state": info.state,
            "alias_of": info.alias_of or None,
            "cold_start_s": round(info.cold_start_s, 1) if info.cold_start_s else None,
            "context_length": info.context_length,
            "dtype": info.dtype,
            "weight_format": info.weight_format,
            "digest": info.digest,
            "call_format": info.call_format,
            "ready_replicas": info.ready_replicas,
            "versions": [_version_object(version) for version in info.versions],
            "sampling_defaults": {
                name: value
                for name, value in msgspec.structs.asdict(defaults).items()
                if isinstance(value, (int, float))
            },
            **(adapter if info.parent else {}),
        },
    }
