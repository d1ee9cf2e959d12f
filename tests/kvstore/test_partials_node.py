"""Parts over the wire to a kvstore process: joined in RAM, kept on the SSD as any block, lent by the head from both."""

from __future__ import annotations

import asyncio
import re
import signal
import urllib.request
from pathlib import Path

from services.common.blocks import BlockId
from services.common.transfer.header import verify_block
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    STOP_HEADS,
    STOP_MISSING,
    PullResult,
    PushRequest,
    PushResult,
    Transport,
)
from tests.common.transfer.blocks import chain
from tests.common.transfer.conftest import shown, transport, transport_name
from tests.common.transfer.test_transports import Pulled, pull
from tests.kvstore.conftest import KvStoreProcess, StartKvStore
from tests.kvstore.parts import LEFT, NUM_HEADS, RIGHT, format_of, part_header, share
from tests.kvstore.test_node import announced, stats
from tests.support.valkey import Valkey
from tests.support.waiting import eventually_async

__all__ = ["transport", "transport_name"]

_BLOCK_BYTES = 256 * 1024
_FORMAT = format_of(_BLOCK_BYTES)


async def push_part(
    client: Transport, node: KvStoreProcess, ids: list[BlockId], heads: HeadRange, *, spoil: int = -1
) -> PushResult:
    """Offer these heads of a chain; those of block `spoil` with a wrong bit."""
    data = [bytearray(share(block_id, heads, _BLOCK_BYTES)) for block_id in ids]
    headers = [part_header(ids, i, heads, bytes(part), block_format=_FORMAT) for i, part in enumerate(data)]
    if spoil >= 0:
        data[spoil][-1] ^= 1
    return await client.push(node.peer, PushRequest(headers, shown([bytes(part) for part in data]), 0, 10.0))


async def pull_part(
    client: Transport, node: KvStoreProcess, ids: list[BlockId], heads: HeadRange
) -> tuple[PullResult, list[str]]:
    """Pull these heads; what came is compared with what was pushed."""
    pulled = Pulled(ids, _BLOCK_BYTES // NUM_HEADS * heads.count)
    result = await pull(client, node.peer, pulled, epoch=0, heads=heads)
    for header, buffer, block_id in zip(pulled.headers, pulled.buffers, ids, strict=False):
        verify_block(header, buffer, block_id, _FORMAT, heads)
        assert buffer == share(block_id, heads, _BLOCK_BYTES)
    return result, pulled.tiers


async def test_parts_are_joined_in_order_and_lent_by_the_head(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore, valkey: Valkey
) -> None:
    node = start_kvstore(transport_name)
    ids = chain(20)
    assert await push_part(transport, node, ids, LEFT) == PushResult(20, 0)
    assert (await pull_part(transport, node, ids, LEFT))[0] == PullResult(0, STOP_MISSING)
    assert await announced(valkey) == set()
    assert await push_part(transport, node, ids, RIGHT, spoil=12) == PushResult(12, 8)
    assert (await stats(node)).pushed_blocks == 12
    for heads in (LEFT, RIGHT, HeadRange(1, 2), HeadRange(0, 4)):
        assert (await pull_part(transport, node, ids, heads))[0] == PullResult(12, STOP_MISSING)
    assert (await pull_part(transport, node, ids, HeadRange(2, 3)))[0] == PullResult(0, STOP_HEADS)
    assert await push_part(transport, node, ids, RIGHT) == PushResult(20, 0)
    assert (await pull_part(transport, node, ids, RIGHT))[0] == PullResult(20, STOP_COMPLETE)

    async def listed() -> bool:
        return await announced(valkey) == set(ids)

    await eventually_async(listed)
    counts = await stats(node)
    assert (counts.ram_blocks, counts.verification_failures, counts.open_leases) == (20, 1, 0)


async def test_joined_blocks_survive_a_crash_and_lone_parts_do_not(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore, tmp_path: Path
) -> None:
    flags = ("--ram-bytes", str(32 * 2**20), "--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", str(64 * 2**20))
    node = start_kvstore(transport_name, *flags)
    ids, lone = chain(8), chain(5, 1)
    await push_part(transport, node, lone, LEFT)
    for heads in (RIGHT, LEFT):
        assert await push_part(transport, node, ids, heads) == PushResult(8, 0)

    async def written() -> bool:
        return (await stats(node)).ssd.blocks == 8

    await eventually_async(written)
    node.process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(node.process.wait, 30)
    again = start_kvstore(transport_name, *flags)
    assert (await stats(again)).ssd.blocks == 8
    # The lone part is gone: the other half of these blocks makes nothing whole.
    assert await push_part(transport, again, lone, RIGHT) == PushResult(5, 0)
    assert (await pull_part(transport, again, lone, RIGHT))[0] == PullResult(0, STOP_MISSING)
    result, tiers = await pull_part(transport, again, ids, RIGHT)
    assert (result, tiers) == (PullResult(8, STOP_COMPLETE), ["ssd"] * 8)
    assert (await pull_part(transport, again, ids, HeadRange(0, 1)))[1] == ["ram"] * 8


async def test_what_stays_incomplete_is_dropped_and_counted(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore
) -> None:
    node = start_kvstore(transport_name, "--partial-max-age-s", "0.3", "--partial-bytes", str(4 * _BLOCK_BYTES))
    ids = chain(6)
    assert await push_part(transport, node, ids, LEFT) == PushResult(4, 2)
    line = re.compile(r'^kvmesh_kvstore_dropped_partial_blocks_total\{.*reason="heads missing".*\} 4\.0$', re.MULTILINE)

    async def counted() -> bool:
        text = await asyncio.to_thread(_read, f"http://{node.ready['metrics']}/metrics")
        return line.search(text) is not None

    await eventually_async(counted)
    assert await push_part(transport, node, ids[:4], RIGHT) == PushResult(4, 0)
    assert (await pull_part(transport, node, ids, RIGHT))[0].num_blocks == 0


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        text: str = response.read().decode()
        return text
