"""Which version of a public name serves a conversation."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.planning import ModelView
from services.gateway.request import GenerationRequest
from services.gateway.versions import VersionView, choose, conversation_key, without


def view(number: int, weight: float) -> VersionView:
    model = ModelView(
        name="m",
        digest=bytes([number]) * 16,
        context_length=8192,
        kv_dtype="bfloat16",
        block_tokens=16,
        layout_version=1,
        vocab_size=100,
    )
    return VersionView(model, weight)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", **fields)


def chat(*texts: str, system: str = "Be brief.") -> GenerationRequest:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return request(chat=[{"role": "system", "content": system}, *turns])


@given(st.lists(st.integers(1, 10), min_size=1, max_size=5))
def test_each_version_gets_its_share(weights: list[int]) -> None:
    versions = [view(number, weight) for number, weight in enumerate(weights)]
    counts = Counter(choose(versions, key(number)).digest for number in range(2000))
    for version in versions:
        share = version.weight / sum(weights)
        # Six standard deviations.
        assert abs(counts[version.view.digest] / 2000 - share) < 6 * (share * (1 - share) / 2000) ** 0.5 + 1e-9


@given(st.integers(1, 99), st.integers(1, 99), st.integers(0, 10**9))
def test_when_weights_shift_conversations_move_only_to_what_gained(before: int, after: int, number: int) -> None:
    old = choose([view(1, 100 - before), view(2, before)], key(number))
    new = choose([view(1, 100 - after), view(2, after)], key(number))
    if old != new:
        assert new.digest == (view(2, 1) if after > before else view(1, 1)).view.digest


@given(st.integers(0, 10**9), st.integers(0, 2))
def test_when_a_version_goes_the_others_keep_their_conversations(number: int, gone: int) -> None:
    versions = [view(0, 3), view(1, 1), view(2, 2)]
    chosen = choose(versions, key(number))
    left = without({"m": tuple(versions)}, "m", versions[gone].view.digest)
    assert left is not None
    if chosen.digest != versions[gone].view.digest:
        assert choose(left["m"], key(number)) == chosen


def test_a_name_without_another_version_has_no_other() -> None:
    assert without({"m": (view(1, 1),)}, "m", view(1, 1).view.digest) is None
    assert without({}, "m", b"") is None


def test_the_turns_of_a_chat_are_one_conversation() -> None:
    first = conversation_key("t", chat("Hello"))
    assert conversation_key("t", chat("Hello", "Hi.", "And now?")) == first
    assert conversation_key("t", chat("Hello", "Hi.", "And now?", system="Be long.")) != first
    assert conversation_key("t", chat("Good evening")) != first
    assert conversation_key("u", chat("Hello")) != first


def test_a_cache_salt_names_the_conversation() -> None:
    salted = conversation_key("t", request(prompts=["a"], cache_salt="s"))
    assert conversation_key("t", request(prompts=["b"], cache_salt="s")) == salted
    assert conversation_key("t", request(prompts=["a"])) != salted
    assert conversation_key("u", request(prompts=["a"], cache_salt="s")) != salted


def test_a_raw_prompt_is_known_by_its_beginning() -> None:
    long = "word " * 2000
    assert conversation_key("t", request(prompts=[long])) == conversation_key("t", request(prompts=[long + "more"]))
    assert conversation_key("t", request(prompts=["a"])) != conversation_key("t", request(prompts=["ab"]))
    ids = list(range(2000))
    assert conversation_key("t", request(prompts=[ids])) == conversation_key("t", request(prompts=[[*ids, 7]]))
    assert conversation_key("t", request(prompts=["\ud800"])) != conversation_key("t", request(prompts=[]))
