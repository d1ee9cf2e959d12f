"""Pools of different tensor-parallel sizes reuse each other's blocks, over every transport, to the last bit.

Real movers of ranks, a real kvstore node, and a random model with four KV heads whose cache a runner computes in the
pool of a mover that has them all.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.batch import PagedBatch
from kernels.paged_attention import paged_attention
from services.common.blocks import BLOCK_TOKENS, BlockId
from services.common.transfer.header import BlockFormat, Segment
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import STOP_HEADS, PeerAddress
from services.worker.model.kv_pool import KvPool
from services.worker.model.layout import KvLayout
from services.worker.model.load import kv_layout, load_runner
from services.worker.model.model_files import open_model
from services.worker.model.runner import CpuRunner
from services.worker.mover_messages import PullDone, PushDone
from tests.common.transfer.blocks import chain, payload
from tests.common.transfer.conftest import transport_name
from tests.kvstore.conftest import KvStoreProcess, StartKvStore, start_kvstore
from tests.worker.model.steps import Chunk, run
from tests.worker.model.test_hf_folder import save
from tests.worker.mover.conftest import NUM_BLOCKS, MoverProcess, StartMover
from tests.worker.mover.test_mover import run_at

__all__ = ["start_kvstore", "transport_name"]

_KV_HEADS, _GROUP, _HEAD_DIM, _LAYERS = 4, 2, 32, 2
_FULL_BLOCKS = 6
_TOKENS = _FULL_BLOCKS * BLOCK_TOKENS + 5
# Movers start slowly on a busy machine; ranks of a replica push within milliseconds of each other.
_PATIENT = ("--partial-max-age-s", "60")
_ROOT = BlockId(b"r" * 16)
_LEFT, _RIGHT = HeadRange(0, 2), HeadRange(2, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; eight query heads over four KV heads."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"num_attention_heads": _KV_HEADS * _GROUP, "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_DIM}
    save(folder, num_hidden_layers=_LAYERS, **shape)
    return folder


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(5, 300, (_TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()


def format_of(model: Path) -> BlockFormat:
    layout = kv_layout(open_model(model).config, "bfloat16")
    segment = Segment(0, layout.num_layers, layout.block_shape, "bfloat16")
    return BlockFormat(b"d" * 16, "bfloat16", layout.num_kv_heads, layout.block_bytes, (segment,))


def runner_in(mover: MoverProcess, model: Path) -> CpuRunner:
    """As an engine: it computes in the pool that the mover moves."""
    return load_runner(model, pool_buffer=mover.pool, served_context=256)


def tensor_of(mover: MoverProcess) -> torch.Tensor:
    """The pool of a rank, as its kernels see it."""
    layout = KvLayout(mover.heads.count, _LAYERS, _HEAD_DIM, "bfloat16")
    return KvPool.from_buffer(mover.pool, layout).blocks


async def push_all(mover: MoverProcess, node: KvStoreProcess, ids: list[BlockId], slots: Sequence[int]) -> int:
    """How many blocks were accepted. Asks again when nothing was: on a busy machine a connection may take too long."""
    for key in range(10, 14):
        # A target that was just named does not rest.
        mover.target("kv-1", node.peer)
        mover.push(key, ids, [_ROOT, *ids[:-1]], list(slots), starts=True)
        if accepted := (await mover.done(PushDone, key)).accepted:
            return accepted
    return 0


async def pull_all(
    mover: MoverProcess, peer: PeerAddress, ids: list[BlockId], slots: Sequence[int], *, kind: str = "kvstore"
) -> PullDone:
    """The end of a pull, another one when there was no connection in time."""
    for key in itertools.count(20):
        mover.pull(key, ids, list(slots), run_at(peer, 0, len(ids), kind=kind, epoch=0))
        done = await mover.done(PullDone, key)
        if key == 23 or not done.error.startswith(("PeerLost", "TransferTimeout", "the node rests")):
            return done
        mover.messages.clear()
        await asyncio.sleep(1.0)
    raise AssertionError


def attention(pool: torch.Tensor, query: torch.Tensor, layer: int, table: Sequence[int]) -> torch.Tensor:
    """Of tokens at several positions of the full blocks."""
    count = len(query)
    last = np.linspace(3, _FULL_BLOCKS * BLOCK_TOKENS - 1, count).astype(np.int32)
    tables = np.tile(np.array(table, np.int32), (count, 1))
    starts = np.arange(count + 1, dtype=np.int32)
    batch = PagedBatch(np.zeros(count, np.int32), last, starts, last + 1, tables, starts[:-1])
    return paged_attention(query, pool, layer, batch, scale=_HEAD_DIM**-0.5)


async def test_two_ranks_use_what_one_made(
    transport_name: str, start_mover: StartMover, start_kvstore: StartKvStore, model: Path, tokens: list[int]
) -> None:
    whole, node = await start_mover(transport_name, format_of(model)), start_kvstore(transport_name, *_PATIENT)
    table, ids = [9, 4, 30, 31, 2, 17, 40], chain(_FULL_BLOCKS)
    with runner_in(whole, model) as runner:
        run(runner, Chunk(tokens, 0, table))
    assert await push_all(whole, node, ids, table[:_FULL_BLOCKS]) == _FULL_BLOCKS
    query = torch.randn(5, _KV_HEADS * _GROUP, _HEAD_DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots = list(range(20, 20 + _FULL_BLOCKS))
    for heads in (_LEFT, _RIGHT):
        rank = await start_mover(transport_name, format_of(model), heads)
        done = await pull_all(rank, node.peer, ids, slots)
        assert (done.num_blocks, done.error, set(done.tiers)) == (_FULL_BLOCKS, "", {"ram"})
        mine = slice(heads.first * _GROUP, heads.end * _GROUP)
        for layer in range(_LAYERS):
            expected = attention(tensor_of(whole), query, layer, table[:_FULL_BLOCKS])[:, mine]
            assert torch.equal(attention(tensor_of(rank), query[:, mine], layer, slots), expected)


async def test_one_goes_on_from_what_two_ranks_made(
    transport_name: str, start_mover: StartMover, start_kvstore: StartKvStore, model: Path, tokens: list[int]
) -> None:
    oracle, node = await start_mover(transport_name, format_of(model)), start_kvstore(transport_name, *_PATIENT)
    first, ids = list(range(_FULL_BLOCKS + 1)), chain(_FULL_BLOCKS)
    runner = runner_in(oracle, model)
    run(runner, Chunk(tokens, 0, first))
    one, table = await start_mover(transport_name, format_of(model)), [50, *range(33, 33 + _FULL_BLOCKS)]
    for heads in (_RIGHT, _LEFT):
        rank = await start_mover(transport_name, format_of(model), heads)
        for slot in range(_FULL_BLOCKS):
            rank.slot(slot)[:] = rank.share(bytes(oracle.slot(slot)))
        # Nobody sees a block before every rank has pushed it.
        assert (await pull_all(one, node.peer, ids, table[:_FULL_BLOCKS])).num_blocks == 0
        one.messages.clear()
        assert await push_all(rank, node, ids, range(_FULL_BLOCKS)) == _FULL_BLOCKS
    done = await pull_all(one, node.peer, ids, table[:_FULL_BLOCKS])
    assert (done.num_blocks, done.error) == (_FULL_BLOCKS, "")
    start = _FULL_BLOCKS * BLOCK_TOKENS
    with runner, runner_in(one, model) as other:
        rest = tokens[start:]
        for _ in range(6):
            expected = run(runner, Chunk(rest, start, first), last_only=True)
            assert torch.equal(run(other, Chunk(rest, start, table), last_only=True), expected)
            start, rest = start + len(rest), [int(expected[0].argmax())]


async def test_four_ranks_make_what_two_use(
    transport_name: str, start_mover: StartMover, start_kvstore: StartKvStore, model: Path
) -> None:
    node, ids, expected = start_kvstore(transport_name, *_PATIENT), chain(10), format_of(model)
    for head in (3, 0, 2, 1):
        rank = await start_mover(transport_name, expected, HeadRange(head, 1))
        assert await push_all(rank, node, ids, rank.fill(ids)) == len(ids)
    for heads in (_LEFT, _RIGHT):
        rank = await start_mover(transport_name, expected, heads)
        slots = list(range(NUM_BLOCKS - len(ids), NUM_BLOCKS))
        assert (await pull_all(rank, node.peer, ids, slots)).num_blocks == len(ids)
        for slot, block_id in zip(slots, ids, strict=True):
            assert rank.slot(slot) == rank.share(payload(block_id, expected.block_bytes))


async def test_a_rank_serves_the_heads_that_it_owns(transport_name: str, start_mover: StartMover, model: Path) -> None:
    """Alone, or in part; who wants others too gets nothing, and computes."""
    expected, ids = format_of(model), chain(12)
    holder = await start_mover(transport_name, expected, _RIGHT)
    holder.fill(ids)
    for heads, served in ((_RIGHT, True), (HeadRange(3, 1), True), (HeadRange(1, 2), False), (HeadRange(0, 4), False)):
        puller = await start_mover(transport_name, expected, heads)
        done = await pull_all(puller, holder.peer, ids, range(len(ids)), kind="worker")
        assert (done.num_blocks, done.error) == ((len(ids), "") if served else (0, STOP_HEADS))
        for slot, block_id in enumerate(ids):
            whole = payload(block_id, expected.block_bytes)
            assert puller.slot(slot) == (puller.share(whole) if served else bytes(puller.slot_bytes))
        puller.end()


async def test_a_whole_pool_serves_ranks(transport_name: str, start_mover: StartMover, model: Path) -> None:
    expected, ids = format_of(model), chain(12)
    holder = await start_mover(transport_name, expected)
    holder.fill(ids)
    puller = await start_mover(transport_name, expected, HeadRange(1, 2))
    assert (await pull_all(puller, holder.peer, ids, range(len(ids)), kind="worker")).num_blocks == len(ids)
    for slot, block_id in enumerate(ids):
        assert puller.slot(slot) == puller.share(payload(block_id, expected.block_bytes))
