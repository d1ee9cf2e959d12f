"""Log probabilities of prompts: in both formats, over failures and moves of workers, from workers that know them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from kvmesh.v1.inference_pb2 import GenerateRequest, TokenIds

from services.common.release import GRAMMAR_PROTOCOL, PROTOCOL, SCORE_PROTOCOL
from tests.gateway.conftest import ANSWER, Mesh
from tests.gateway.fakes import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The sky is blue, and so is the sea."


def script(mesh: Mesh, **changes: Any) -> Script:
    return Script(mesh.text.encode_text(ANSWER), **changes)


async def test_of_each_token_but_the_first_in_the_form_of_vllm(mesh: Mesh) -> None:
    tokens = mesh.text.encode_text(PROMPT)
    answer = await mesh.complete([PROMPT, "Hi"], prompt_logprobs=2, n=2)
    assert len(answer["choices"]) == 4
    first, *rest = answer["choices"][1]["prompt_logprobs"]
    assert first is None
    assert [set(one) for one in rest] == [{"20", "21", str(token)} for token in tokens[1:]]
    own = rest[0][str(tokens[1])]
    assert own == {"logprob": -0.5, "rank": 9, "decoded_token": mesh.text.vocabulary.text_of(tokens[1])}
    assert rest[0]["21"]["rank"] == 2
    assert answer["choices"][2]["prompt_logprobs"] == [None], "a prompt of one token has none"
    assert answer["choices"][0]["logprobs"] is None
    assert all(not ask.block_ids and not ask.can_hand_off for ask in mesh.router.asks)
    assert {ask.requires.protocol for ask in mesh.router.asks} == {SCORE_PROTOCOL}


async def test_before_those_of_an_echoed_completion(mesh: Mesh) -> None:
    tokens, text = mesh.text.encode_text(PROMPT), " Both are far away."
    mesh.say(text)
    answer = await mesh.complete(PROMPT, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT + text
    assert "prompt_logprobs" not in choice
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == [-0.5] * (len(told["tokens"]) - 1)
    for token, start in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"][start : start + len(token)] == token
    both = await mesh.complete(PROMPT, echo=True, logprobs=0, prompt_logprobs=3)
    assert len(both["choices"][0]["prompt_logprobs"][1]) == 4
    assert set(both["choices"][0]["logprobs"]["top_logprobs"][1]) == {mesh.text.vocabulary.text_of(tokens[1])}


@pytest.mark.parametrize("said", [(0,), (2,), (4, 2)])
async def test_another_worker_tells_them_again_and_the_client_once(mesh: Mesh, said: tuple[int, ...]) -> None:
    expected = await mesh.complete(PROMPT, prompt_logprobs=1)
    mesh.plan[:] = [*(script(mesh, fail_scoring=after) for after in said), script(mesh)]
    answer = await mesh.complete(PROMPT, prompt_logprobs=1)
    assert answer["choices"] == expected["choices"]
    assert answer["usage"] == expected["usage"]


async def test_who_fails_after_the_first_token_has_told_them(mesh: Mesh) -> None:
    expected = await mesh.complete(PROMPT, prompt_logprobs=1)
    mesh.plan[:] = [script(mesh, fail_after=2), script(mesh)]
    assert (await mesh.complete(PROMPT, prompt_logprobs=1))["choices"] == expected["choices"]
    assert mesh.workers[1].requests[0].known


async def test_a_worker_that_would_leave_is_left_after_the_first_token(mesh: Mesh) -> None:
    expected = await mesh.complete(PROMPT, prompt_logprobs=1)
    mesh.plan[:] = [script(mesh, leave_scoring=True, pause_s=0.03), script(mesh)]
    assert (await mesh.complete(PROMPT, prompt_logprobs=1))["choices"] == expected["choices"]
    (moved,) = mesh.workers[1].requests
    assert moved.hold_s > 0
    assert moved.known


async def test_the_native_api_has_them(mesh: Mesh) -> None:
    tokens = mesh.text.encode_text(PROMPT)
    mesh.plan[:] = [script(mesh, fail_scoring=3), script(mesh)]
    request = GenerateRequest(model="smollm2-135m", token_ids=TokenIds(ids=tokens), num_prompt_logprobs=1)
    kinds, told = [], []
    async for response in mesh.native.Generate(request):
        kinds.append(response.WhichOneof("event"))
        if kinds[-1] == "prompt_logprobs":
            assert response.prompt_logprobs.first == len(told) + 1
            told += [one.chosen.token_id for one in response.prompt_logprobs.logprobs]
    assert told == tokens[1:]
    assert kinds.index("delta") > max(i for i, kind in enumerate(kinds) if kind == "prompt_logprobs")


async def test_a_worker_of_an_earlier_release_is_passed_over(mesh: Mesh) -> None:
    expected = await mesh.complete(PROMPT, prompt_logprobs=1)
    older = mesh.workers[0]
    older.protocol = GRAMMAR_PROTOCOL
    try:
        assert (await mesh.complete(PROMPT, prompt_logprobs=1))["choices"] == expected["choices"]
    finally:
        older.protocol = PROTOCOL
    assert mesh.workers[1].requests


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("Completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("Completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("Completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("Completions", {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ("Completions", {"prompt": [1] * 8000, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("Completions", {"prompt": [1] * 8000, "prompt_logprobs": 1, "n": 16}, "prompt_logprobs"),
        ("ChatCompletions", {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_refusals(mesh: Mesh, path: str, fields: dict[str, Any], param: str) -> None:
    code, error, _ = await mesh.error(path, {"model": "smollm2-135m", **fields})
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert error["param"] == param
