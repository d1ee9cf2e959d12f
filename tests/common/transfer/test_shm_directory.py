"""Reads by directory: against a model, a writer that never rests, and what can go wrong at the holder."""

from __future__ import annotations

import asyncio
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.common.blocks import BlockId
from services.common.security import MeshSecret
from services.common.transfer import shm_directory, wire
from services.common.transfer.errors import ProtocolViolation
from services.common.transfer.protocol import (
    MAX_PULL_BLOCKS,
    STOP_COMPLETE,
    STOP_EPOCH,
    STOP_MISSING,
    PeerAddress,
    PullRequest,
)
from services.common.transfer.shm_client import ShmStatistics, ShmTransport
from services.common.transfer.shm_connection import ShmConnection, listen
from services.common.transfer.shm_directory import MAX_LISTED_HEADER, BlockDirectory, DirectoryReader
from services.common.transfer.shm_reads import TURN_BYTES
from services.common.transfer.shm_regions import create_region
from tests.common.transfer.blocks import EPOCH, SECRET, block_format, chain
from tests.common.transfer.conftest import StartHolder
from tests.common.transfer.directory_writer import NUM_SLOTS, SLOT_BYTES, content, ids_of_writer
from tests.common.transfer.test_transports import BLOCK_BYTES, Pulled, pull
from tests.support.waiting import eventually

_KEY = MeshSecret(SECRET).pull_key
_ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not shm_directory.directory_supported(), reason="directories need x86-64")


@pytest.fixture
def transport_name() -> str:
    return "shm"


def _directory(capacity_bytes: int = 2**20) -> BlockDirectory:
    directory = BlockDirectory.create(capacity_bytes, EPOCH)
    assert directory is not None
    return directory


def _block_id(number: int) -> BlockId:
    """Few buckets and equal tags, so that they meet."""
    return BlockId(struct.pack("<QQ", number % 3, number // 3))


@example([(True, 0), (True, 3)])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60))))
def test_it_answers_as_a_dict_would(steps: list[tuple[bool, int]]) -> None:
    directory = _directory(4 * 2**20)
    reader = DirectoryReader(directory.region.view)
    model: dict[BlockId, tuple[int, bytes]] = {}
    for adds, number in steps:
        block_id = _block_id(number)
        if not adds:
            directory.remove(block_id)
            model.pop(block_id, None)
        elif directory.add(block_id, number * 4096, 4096, b"h" * (number + 1)):
            assert block_id not in model
            model[block_id] = number * 4096, b"h" * (number + 1)
    assert len(directory) == len(model)
    for number in range(61):
        listed = reader.find(_block_id(number))
        expected = model.get(_block_id(number))
        assert (listed is None) == (expected is None)
        if listed is not None and expected is not None:
            assert (listed.place, listed.header) == ((0, expected[0], 4096), expected[1])
            assert reader.is_current(listed)


def test_an_entry_that_changed_is_not_current() -> None:
    directory = _directory()
    reader = DirectoryReader(directory.region.view)
    block_id, other = chain(2)
    directory.add(block_id, 0, 4096, b"header")
    before = reader.find(block_id)
    assert before is not None
    directory.remove(block_id)
    assert not reader.is_current(before)
    assert reader.find(block_id) is None
    directory.add(other, 0, 4096, b"header")
    directory.add(block_id, 0, 4096, b"header")
    assert not reader.is_current(before)


def test_what_has_no_room_is_not_listed() -> None:
    directory = _directory(0)
    ids = [BlockId(struct.pack("<QQ", 0, number + 1)) for number in range(9)]
    assert [directory.add(block_id, 0, 1, b"h") for block_id in ids] == [True] * 8 + [False]
    directory.remove(ids[3])
    assert not directory.add(ids[8], 0, 1, bytes(MAX_LISTED_HEADER + 1))
    assert directory.add(ids[8], 0, 1, bytes(MAX_LISTED_HEADER))
    assert not directory.add(ids[8], 0, 1, b"twice")
    directory.remove(ids[3])
    assert len(directory) == 8


def test_other_memory_is_no_directory() -> None:
    for memory in (b"", bytes(64), bytes(4096), bytes(_directory().region.view)[:-1]):
        with pytest.raises(ProtocolViolation):
            DirectoryReader(memoryview(memory))


async def test_listed_blocks_are_read_without_asking(start_holder: StartHolder) -> None:
    """The holder is stopped: nothing but memory answers. It counts the reads when it goes on."""
    holder = start_holder("--blocks", "40", "--listed", "40")
    transport = ShmTransport(_KEY, [])
    await pull(transport, holder.peer, Pulled(chain(1)))
    holder.signal(signal.SIGSTOP)
    pulled = Pulled(chain(40))
    assert (await pull(transport, holder.peer, pulled, deadline_s=1.0)).stop == STOP_COMPLETE
    pulled.assert_good(40)
    assert 40 * BLOCK_BYTES > 2 * TURN_BYTES
    holder.signal(signal.SIGCONT)
    expected = [block_id.hex() for block_id in [*chain(1), *chain(40)]]
    await eventually(lambda: holder.state()["read"] == expected)
    assert holder.state()["traceparents"] == []
    await transport.close()


async def test_many_small_reads_cost_the_holder_few_messages(start_holder: StartHolder) -> None:
    """Each block is counted, in order; reads of other requests are told of apart."""
    holder = start_holder("--blocks", "8", "--listed", "8")
    transport = ShmTransport(_KEY, [])
    await pull(transport, holder.peer, Pulled(chain(8)))
    before = holder.state()["notes"]
    for _ in range(300):
        await pull(transport, holder.peer, Pulled(chain(2)))
    await eventually(lambda: len(holder.state()["read"]) == 8 + 600)
    assert holder.state()["notes"] - before < 150
    await transport.close()


def test_reads_are_joined_by_request_and_up_to_a_bound() -> None:
    one = wire.WasRead(b"a" * 16, 0.5, "trace", "request")
    assert one.joined(one) == wire.WasRead(b"a" * 32, 1.0, "trace", "request")
    assert one.joined(wire.WasRead(b"a" * 16, 0.5, "trace", "another")) is None
    assert one.joined(wire.WasRead(b"a" * 16, 0.5, "another", "request")) is None
    assert one.joined(wire.WasRead(b"a" * 16 * MAX_PULL_BLOCKS, 0.5, "trace", "request")) is None


async def test_the_rest_is_asked_for(start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "30", "--listed", "20")
    transport = ShmTransport(_KEY, [])
    pulled = Pulled(chain(30))
    assert (await pull(transport, holder.peer, pulled)).stop == STOP_COMPLETE
    pulled.assert_good(30)
    holder.state("strike 5")
    pulled = Pulled(chain(40))
    result = await pull(transport, holder.peer, pulled)
    assert (result.num_blocks, result.stop) == (30, STOP_MISSING)
    pulled.assert_good(30)
    await eventually(lambda: len(holder.state()["read"]) == 25)
    assert len(holder.state()["traceparents"]) == 2
    await transport.close()


async def test_it_counts_what_was_read_and_what_was_lent(start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "30", "--listed", "20")
    transport, asking = ShmTransport(_KEY, []), ShmTransport(_KEY, [], ask_always=True)
    for client in (transport, asking):
        await pull(client, holder.peer, Pulled(chain(30)))
    assert transport.statistics() == ShmStatistics(read_blocks=20, lent_blocks=10)
    assert asking.statistics() == ShmStatistics(read_blocks=0, lent_blocks=30)
    await transport.close()
    await asking.close()


async def test_another_epoch_reads_nothing(start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "4", "--listed", "4")
    transport = ShmTransport(_KEY, [])
    result = await pull(transport, holder.peer, Pulled(chain(4)), epoch=EPOCH + 1)
    assert (result.num_blocks, result.stop) == (0, STOP_EPOCH)
    assert (await pull(transport, holder.peer, Pulled(chain(4)), epoch=0)).num_blocks == 4
    await transport.close()


async def test_buffers_of_another_size_are_never_filled(start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "4", "--listed", "4")
    transport = ShmTransport(_KEY, [])
    pulled = Pulled(chain(4), BLOCK_BYTES // 2)
    with pytest.raises(ProtocolViolation):
        await pull(transport, holder.peer, pulled)
    assert bytes(pulled.memory) == bytes(len(pulled.memory))
    await transport.close()


async def test_a_holder_that_dies_in_the_middle(start_holder: StartHolder) -> None:
    """What is listed stays readable until its end is noticed; what is reported is good."""
    holder = start_holder("--blocks", "40", "--listed", "40")
    transport = ShmTransport(_KEY, [])
    await pull(transport, holder.peer, Pulled(chain(1)))
    pulled = Pulled(chain(40))
    task = asyncio.ensure_future(pull(transport, holder.peer, pulled))
    await pulled.first.wait()
    holder.end()
    await asyncio.wait((task,), timeout=30.0)
    assert task.done()
    pulled.assert_good(len(pulled.headers))
    await transport.close()


async def test_a_directory_that_lies_costs_its_owner_the_connection() -> None:
    """A place outside the shown memory."""
    address = "127.0.0.1:65002"
    region, directory = create_region("kvmesh-test", 8192), _directory()
    assert region is not None
    block_id = chain(1)[0]
    directory.add(block_id, 4096, 8192, b"header")
    listener = listen(_KEY, address)
    transport = ShmTransport(_KEY, [])
    pulling = asyncio.ensure_future(
        transport.pull(
            PeerAddress("", address),
            PullRequest([block_id], EPOCH, 30.0),
            [memoryview(bytearray(8192))],
            lambda *_: pytest.fail("reported"),
        )
    )
    endpoint, _ = await asyncio.get_running_loop().sock_accept(listener)
    connection = await ShmConnection.accept(endpoint, _KEY, [region], directory.region)
    connection.start()
    with pytest.raises(ProtocolViolation):
        await pulling
    await eventually(lambda: connection.error is not None)
    listener.close()
    await transport.close()


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lists, strikes off and overwrites blocks without rest, over memory that this one maps."""
    command = [sys.executable, "-m", "tests.common.transfer.directory_writer"]
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_no_read_is_torn(writer: subprocess.Popen[bytes]) -> None:
    """Every copy that the directory calls current has the bytes of its block, to the last."""
    assert writer.stdout is not None
    address = writer.stdout.readline().decode().strip()
    connection = await ShmConnection.connect(address, _KEY, [])
    reader = connection.peer_directory
    assert reader is not None
    ids = ids_of_writer()
    good = lost = 0
    buffer = bytearray(SLOT_BYTES)
    until_s = time.monotonic() + 120.0
    while (good < 3000 or lost < 20) and time.monotonic() < until_s:
        for block_id in ids:
            listed = reader.find(block_id)
            if listed is None:
                continue
            buffer[:] = connection.peer_view(listed.place)
            if reader.is_current(listed):
                assert buffer == content(block_id)
                assert listed.header == bytes(block_id) * 4
                good += 1
            else:
                lost += 1
        await asyncio.sleep(0)
    assert good >= 3000
    assert lost >= 20, "the writer never came between"
    assert len(ids) > NUM_SLOTS
    connection.fail(ProtocolViolation("end of the test"))


def test_a_header_of_many_heads_fits() -> None:
    """40 KV heads, more than models in use have, are listed."""
    from services.common.transfer.header import make_header

    data = memoryview(bytearray(40 * 64 * 16))
    assert len(make_header(block_format(len(data), 40), chain(1)[0], data)) <= MAX_LISTED_HEADER
