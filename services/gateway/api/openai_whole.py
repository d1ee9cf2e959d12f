"""An answer that is given as one object, whoever reads it: an HTTP client or a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvmesh.v1.common_pb2 import Usage

from services.gateway.api.openai_embeddings import EmbeddingFormat, embedding_reply
from services.gateway.api.openai_render import Reply, WholeRenderer, encode
from services.gateway.beginning import Begun
from services.gateway.catalog import ModelCatalog
from services.gateway.output import Accepted, Delta, Embedded, Finish, PromptScores
from services.gateway.request import Plan
from services.gateway.session import Session

# Vectors of so many bytes are written while others wait: about a millisecond.
_INLINE_BYTES = 32_768


def reply_of(catalog: ModelCatalog, session: Session, begun: Begun) -> Reply:
    """What the answer of an OpenAI request is written with. Raises GatewayError when its model has just gone."""
    assert begun.reply is not None
    text = catalog.texts[begun.plan.model]
    return Reply(begun.plan, begun.reply, text, request_id=session.answer_id, created_s=session.created_s)


async def whole_answer(
    session: Session, begun: Begun, reply: Reply, on_accepted: Callable[[Accepted], Awaitable[None]] | None = None
) -> bytes:
    """Read to the end; the JSON object. on_accepted: told once, of the first prompt. Raises GatewayError."""
    renderer = WholeRenderer(reply)
    generation, events = begun.generation, begun.events
    while events:
        for event in events:
            if isinstance(event, Delta):
                session.output_seen()
                renderer.delta(event)
            elif isinstance(event, PromptScores):
                renderer.prompt_scores(event)
            elif isinstance(event, Finish):
                renderer.finish(event)
            elif isinstance(event, Accepted) and on_accepted is not None:
                notify, on_accepted = on_accepted, None
                await notify(event)
        events = await generation.read()
    if not renderer.is_long:
        return renderer.body(generation.usage())
    # So that the streams of others go on.
    return await asyncio.to_thread(renderer.body, generation.usage())


async def whole_embeddings(session: Session, begun: Begun) -> tuple[bytes, Accepted]:
    """Read to the end; the JSON object, and what was told first. Raises GatewayError."""
    generation, events = begun.generation, begun.events
    accepted = events[0]
    assert isinstance(accepted, Accepted)
    assert begun.reply is not None
    assert begun.reply.embedding is not None
    vectors: list[Embedded] = []
    while events:
        vectors += [event for event in events if isinstance(event, Embedded)]
        events = await generation.read()
    session.output_seen()
    parts = begun.plan, begun.reply.embedding, vectors, generation.usage()
    if sum(len(one.values) for one in vectors) <= _INLINE_BYTES:
        return _embedding_body(*parts), accepted
    # So that the streams of others go on.
    return await asyncio.to_thread(_embedding_body, *parts), accepted


def _embedding_body(plan: Plan, form: EmbeddingFormat, vectors: list[Embedded], usage: Usage) -> bytes:
    return encode(embedding_reply(plan, form, vectors, usage))
