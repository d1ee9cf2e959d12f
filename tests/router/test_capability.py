"""A request goes only where it can finish."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.domain import Identity, Placement, RefusalReason, Requirements
from tests.router.scenes import IDENTITY, IDLE, Scene

IDENTITIES = st.builds(
    lambda context, blocks, dtype, role, device, slots, rank, protocol, pooling: replace(
        IDENTITY,
        context_length=context,
        total_blocks=blocks,
        dtype=dtype,
        role=role,
        device=device,
        adapter_slots=slots,
        max_adapter_rank=rank,
        protocol=protocol,
        pooling=pooling,
    ),
    st.integers(1, 4000),
    st.integers(1, 250),
    st.sampled_from(["bfloat16", "float32"]),
    st.sampled_from(["both", "prefill", "decode"]),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(0, 1),
    st.sampled_from([8, 64]),
    st.integers(1, 3),
    st.sampled_from(["", "none", "mean", "last"]),
)
REQUIREMENTS = st.builds(
    Requirements,
    st.sampled_from(["", "bfloat16", "float32"]),
    st.sampled_from(["", "cpu", "cuda"]),
    st.sampled_from([b"", b"a" * 16]),
    st.sampled_from([4, 16]),
    st.integers(0, 3),
    st.sampled_from(["", "", "mean", "last"]),
)


def can_finish(identity: Identity, prompt: int, output: int, requires: Requirements) -> bool:
    total = prompt + output
    return (
        total <= identity.context_length
        and -(-total // 16) <= identity.total_blocks
        and requires.dtype in ("", identity.dtype)
        and requires.device in ("", identity.device)
        and (
            not requires.adapter or (identity.adapter_slots > 0 and requires.adapter_rank <= identity.max_adapter_rank)
        )
        and requires.protocol <= identity.protocol
        and requires.pooling in ("", identity.pooling)
    )


@given(
    st.lists(IDENTITIES, min_size=1, max_size=5),
    st.integers(1, 2000),
    st.integers(1, 2000),
    REQUIREMENTS,
    st.booleans(),
)
def test_only_who_has_room_for_prompt_and_output_and_all_that_is_required(
    identities: list[Identity], prompt: int, output: int, requires: Requirements, knows: bool
) -> None:
    """knows: what a gateway of an earlier release would take for a reason to wait."""
    scene = Scene()
    for number, identity in enumerate(identities):
        scene.worker(f"w{number}", IDLE, identity)
    ask = scene.ask([], tokens=prompt, max_output_tokens=2 * output, num_choices=2, requires=requires)
    answer = scene.place(replace(ask, knows_too_large=knows))
    numbered = [(f"w{number}", one) for number, one in enumerate(identities)]
    able = {name: one for name, one in numbered if can_finish(one, prompt, output, requires)}
    # A worker for prompts does all of a request only where nobody else can.
    able = {name: one for name, one in able.items() if one.role != "prefill"} or able
    if isinstance(answer, Placement):
        assert answer.worker_id in able
    else:
        assert not able
        has_room = any(can_finish(one, prompt, output, Requirements()) for one in identities)
        says_so = knows and not has_room
        assert answer.reason is (RefusalReason.TOO_LARGE if says_so else RefusalReason.NO_WORKER)


@pytest.mark.parametrize(
    ("load", "ask", "has_room"),
    [
        ({}, {}, True),
        ({"waiting_requests": 1}, {}, False),
        # Places: sixteen, of sequences.
        ({"running_requests": 15}, {}, True),
        ({"running_requests": 15}, {"num_choices": 2}, False),
        ({"running_requests": 16}, {}, False),
        ({"running_requests": 4, "decoding_sequences": 15}, {}, True),
        ({"running_requests": 4, "decoding_sequences": 16}, {}, False),
        ({"running_requests": 4, "decoding_sequences": 14}, {"num_choices": 3}, False),
        # Blocks: ten of the prompt, and soon one more of every sequence.
        ({"free_blocks": 11}, {}, True),
        ({"free_blocks": 10}, {}, False),
        ({"free_blocks": 13}, {"num_choices": 3}, True),
        ({"free_blocks": 12}, {"num_choices": 3}, False),
        ({"free_blocks": 14, "running_requests": 1, "decoding_sequences": 3}, {}, True),
        ({"free_blocks": 13, "running_requests": 1, "decoding_sequences": 3}, {}, False),
        # The other choices have said 64 tokens, in blocks of their own.
        ({"free_blocks": 17}, {"num_choices": 3, "further_tokens": 64}, True),
        ({"free_blocks": 16}, {"num_choices": 3, "further_tokens": 64}, False),
    ],
)
def test_what_relieves_a_worker_goes_only_where_it_starts_at_once(
    load: dict[str, int], ask: dict[str, int], *, has_room: bool
) -> None:
    scene = Scene()
    scene.worker("w", replace(IDLE, **load))  # type: ignore[arg-type]
    asked = scene.ask([], tokens=160, max_output_tokens=100, resumes=True, needs_room_now=True, **ask)
    answer = scene.place(asked)
    assert isinstance(answer, Placement) == has_room
    if not isinstance(answer, Placement):
        assert answer.reason is RefusalReason.NO_WORKER


def test_what_is_granted_and_not_told_yet_takes_its_place() -> None:
    scene = Scene()
    scene.worker("w", replace(IDLE, running_requests=14))
    for has_room in (True, True, False):
        asked = scene.ask([], tokens=160, resumes=True, needs_room_now=True)
        assert isinstance(scene.place(asked, count=True), Placement) == has_room
