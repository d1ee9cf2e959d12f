"""An answer that is given as one object, whoever reads it: an HTTP client or a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.gateway.api.openai_embeddings import embedding_reply
from services.gateway.api.openai_render import Reply, WholeRenderer, encode
from services.gateway.beginning import Begun
from services.gateway.catalog import ModelCatalog
from services.gateway.output import Accepted, Delta, Embedded, Finish, PromptScores
from services.gateway.session import Session


def reply_of(catalog: ModelCatalog, session: Session, begun: Begun) -> Reply:
    """What the answer of an OpenAI request is written with. Raises GatewayError when its model has just gone."""
    assert begun.reply is not None
    vocabulary = catalog.texts[begun.plan.model].vocabulary
    return Reply(begun.plan, begun.reply, vocabulary, request_id=session.answer_id, created_s=session.created_s)


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
    return encode(embedding_reply(begun.plan, begun.reply.embedding, vectors, generation.usage())), accepted
