"""Recorded functions and conversations, driven through the real model by the official client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.tool_conversations import asked, function_sets, recorded, traces_folder, with_json_types
from bench.tool_replies import CHOICES, Verdict, answered, ask_both
from tests.support.mesh import MODEL

TOKENS = 32
# One with three calls and their results; of functions, those that are told in the fewest words.
SESSION, SETS = "t12-k1", ("web_search", "memory_rec_sum")


@pytest.fixture(scope="module")
def traces() -> Path:
    folder = traces_folder()
    if folder is None:
        pytest.skip("no recorded conversations: KVMESH_TRACES names their folder")
    return folder


def checked(verdict: Verdict) -> Verdict:
    """An answer that is taken, right, and the same when it is streamed."""
    assert not verdict.reply.refusal
    assert not verdict.faults
    assert not verdict.differing
    return verdict


def test_every_turn_of_a_recorded_conversation(client: openai.OpenAI, traces: Path) -> None:
    """Its calls and results are history, though of functions that are not among the tools any more."""
    tools = [with_json_types(tool) for name in SETS for tool in function_sets(traces)[name]]
    conversation = next(one for one in recorded(traces) if one.name == SESSION)
    assert sum("tool_calls" in message for message in conversation.messages) == 3
    verdicts = [
        checked(
            ask_both(
                client, CHOICES[turn % 3], model=MODEL, messages=messages, tools=tools, max_tokens=TOKENS, temperature=0
            )
        )
        for turn, messages in enumerate(conversation.requests())
    ]
    assert {verdict.choice for verdict in verdicts} == set(CHOICES)
    assert all(verdict.reply.calls for verdict in verdicts if verdict.choice != "auto")


def test_a_conversation_with_the_model_itself(client: openai.OpenAI, traces: Path) -> None:
    """The user's part is recorded; the calls of each answer get results, and are history from then on."""
    user = next(one for one in asked(traces) if "ticket_api" in one.sets)
    tools = [with_json_types(tool) for tool in function_sets(traces)["ticket_api"]][:4]
    messages: list[dict[str, Any]] = []
    for turn, text in enumerate(user.turns[:3]):
        messages.append({"role": "user", "content": text})
        verdict = ask_both(
            client,
            CHOICES[(turn + 1) % 3],
            model=MODEL,
            messages=messages,
            tools=tools,
            max_tokens=TOKENS,
            temperature=0,
            parallel_tool_calls=False,
        )
        messages += answered(checked(verdict), f"call-{turn}")
    assert any("tool_calls" in message for message in messages)


def test_types_that_schemas_do_not_have_are_refused(client: openai.OpenAI, traces: Path) -> None:
    """As published, the functions' types have Python's names: of the whole, then of a part of it."""
    of_python = next(tool for tool in function_sets(traces)["math_api"] if "float" in json.dumps(tool))
    fields: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Go."}], "max_tokens": 1}
    for tool, part in ((of_python, "object"), (_of_an_object(of_python), "#/properties/")):
        good = with_json_types(function_sets(traces)["web_search"][0])
        verdict = ask_both(client, "auto", tools=[good, tool], **fields)
        assert verdict.reply.param == "tools[1].function.parameters"
        assert part in verdict.reply.refusal
        assert not verdict.differing


def _of_an_object(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": {**function["parameters"], "type": "object"}}}
