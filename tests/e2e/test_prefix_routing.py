"""Two workers: a conversation's next turn goes where its prefix is, and is not computed again."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from tests.support.mesh import MODEL, Mesh, total

CONVERSATIONS = 8
TURNS = 5
BLOCK = 16


async def converse(client: openai.AsyncOpenAI, name: str) -> list[tuple[int, int]]:
    """(reusable, cached) prompt tokens of every turn after the first."""
    topic = f"This is conversation {name}. " * 6
    messages: list[Any] = [{"role": "user", "content": topic + "Tell me a short story."}]
    figures: list[tuple[int, int]] = []
    reusable = 0
    for turn in range(TURNS):
        answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        if turn:
            figures.append((reusable, usage.prompt_tokens_details.cached_tokens or 0))
        # Full blocks of the prompt, and of the answer but for its last token, whose KV no step has computed.
        reusable = (usage.prompt_tokens + usage.completion_tokens - 1) // BLOCK * BLOCK
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": f"And then? ({turn})"},
        ]
    return figures


async def test_later_turns_reuse_their_prefix(mesh: Mesh) -> None:
    workers = [entry["name"] for entry in mesh.of_kind("worker")]
    before = {name: mesh.metrics(name) for name in workers}
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        conversations = await asyncio.gather(*(converse(client, chr(65 + i)) for i in range(CONVERSATIONS)))
    reusable = sum(possible for figures in conversations for possible, _ in figures)
    cached = sum(reused for figures in conversations for _, reused in figures)
    print(f"reused {cached} of {reusable} reusable prompt tokens: {cached / reusable:.1%}")
    assert cached >= 0.95 * reusable
    after = {name: mesh.metrics(name) for name in workers}
    counted = sum(
        total(after[name], "kvmesh_cached_prompt_tokens_total")
        - total(before[name], "kvmesh_cached_prompt_tokens_total")
        for name in workers
    )
    assert counted >= cached
    used = [
        name
        for name in workers
        if total(after[name], "kvmesh_prompt_tokens_total") > total(before[name], "kvmesh_prompt_tokens_total")
    ]
    assert len(used) == 2, "both workers take conversations"
