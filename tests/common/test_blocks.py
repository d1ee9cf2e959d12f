"""Block identity: golden vectors (a change here breaks every stored block) and separation of namespaces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.blocks import (
    BLOCK_ID_BYTES,
    BlockId,
    block_root,
    cache_namespace,
    chain_block_ids,
    join_ids,
    next_block_id,
    owner_digest,
    split_ids,
)

KEY = bytes(range(32))
NAMESPACE = cache_namespace(tenant="default", generation=0)
ROOT = block_root(KEY, model_digest=b"m" * 16, kv_dtype="bfloat16", namespace=NAMESPACE)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def test_golden_root() -> None:
    assert ROOT.hex() == "c36469633e71dffae6b1f721d0f28eee"


def test_golden_chain() -> None:
    first, second = chain_block_ids(KEY, ROOT, range(32))
    assert first.hex() == "9302ddae47b9b46a3b80b744c7ea7b84"
    assert second.hex() == "81d70095ad807db6fb8f1d41dea73bef"


def test_golden_owner() -> None:
    assert owner_digest(KEY, tenant="default").hex() == "7f1ae4496f9cf167" + 8 * "00"


@given(tokens)
def test_only_full_blocks_have_ids(ids: list[int]) -> None:
    assert len(chain_block_ids(KEY, ROOT, ids)) == len(ids) // 16


@given(tokens, tokens)
def test_chain_continues_where_it_stopped(first: list[int], second: list[int]) -> None:
    whole = first + second
    cut = len(first) // 16 * 16
    head = chain_block_ids(KEY, ROOT, whole[:cut])
    tail = chain_block_ids(KEY, head[-1] if head else ROOT, whole[cut:])
    assert head + tail == chain_block_ids(KEY, ROOT, whole)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16), st.integers(0, 15), st.integers(1, 2**31))
def test_every_token_matters(ids: list[int], position: int, change: int) -> None:
    other = list(ids)
    other[position] = (other[position] + change) % 2**32
    assert next_block_id(KEY, ROOT, ids) != next_block_id(KEY, ROOT, other)


@given(
    st.lists(
        st.tuples(st.text(max_size=8), st.integers(0, 3), st.none() | st.text(max_size=8), st.text(max_size=8)),
        min_size=2,
        max_size=2,
        unique_by=lambda parts: (None, None, parts[2], parts[3]) if parts[2] is not None else parts,
    )
)
def test_namespaces_never_collide(parts: list[tuple[str, int, str | None, str]]) -> None:
    first, second = (
        cache_namespace(tenant=tenant, generation=generation, shared=shared, cache_salt=salt)
        for tenant, generation, shared, salt in parts
    )
    assert first != second


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": b"n" * 16},
        {"kv_dtype": "float32"},
        {"layout_version": 2},
        {"adapter_digest": b""},
        {"namespace": cache_namespace(tenant="default", generation=1)},
        {"namespace": cache_namespace(tenant="default", generation=0, cache_salt="s")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_root_binds_every_part(change: dict[str, object]) -> None:
    parts: dict[str, object] = {"model_digest": b"m" * 16, "kv_dtype": "bfloat16", "namespace": NAMESPACE, **change}
    assert block_root(KEY, **parts) != ROOT  # type: ignore[arg-type]


def test_another_key_gives_other_ids() -> None:
    assert next_block_id(b"k" * 32, ROOT, range(16)) != next_block_id(KEY, ROOT, range(16))


@given(st.lists(st.binary(min_size=BLOCK_ID_BYTES, max_size=BLOCK_ID_BYTES), max_size=20))
def test_join_and_split_are_inverse(ids: list[bytes]) -> None:
    blocks = [BlockId(block) for block in ids]
    assert split_ids(join_ids(blocks)) == blocks


def test_split_refuses_a_partial_id() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        split_ids(b"x" * 17)
