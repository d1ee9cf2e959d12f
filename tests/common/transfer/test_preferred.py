"""The path to a peer is chosen by what there is, and visible."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from structlog.testing import capture_logs

from services.common.transfer.errors import PeerLost
from services.common.transfer.preferred import PreferredTransport
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    STOP_ELSEWHERE,
    OnBlock,
    PeerAddress,
    PullRequest,
    PullResult,
    PushRequest,
    PushResult,
)
from services.common.transfer.shm_connection import NotHere, NotShown
from tests.common.transfer.blocks import chain

_PEER = PeerAddress("h:1", "h:2")


class Scripted:
    """A transport that does what it is told, and remembers."""

    def __init__(self, name: str, *, count: int = 8, stop: str = STOP_COMPLETE, error: Exception | None = None) -> None:
        self.name = name
        self.pulls: list[int] = []
        self.pushes = 0
        self.error = error
        self._count = count
        self._stop = stop

    async def pull(
        self, peer: PeerAddress, request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock
    ) -> PullResult:
        self.pulls.append(len(request.ids))
        assert len(request.ids) == len(buffers)
        if self.error:
            raise self.error
        count = min(self._count, len(buffers))
        for index in range(count):
            on_block(index, self.name.encode(), "ram")
        return PullResult(count, self._stop, self.name)

    async def push(self, peer: PeerAddress, request: PushRequest) -> PushResult:
        self.pushes += 1
        if self.error:
            raise self.error
        return PushResult(1, 0, self.name)

    async def close(self) -> None:
        pass


def _preferred(shm: Scripted | None, ucx: Scripted | None, grpc: Scripted) -> PreferredTransport:
    return PreferredTransport("ucx" if ucx else "grpc", shm, ucx, grpc)


async def _pull(transport: PreferredTransport, peer: PeerAddress = _PEER) -> tuple[PullResult, list[tuple[int, bytes]]]:
    seen: list[tuple[int, bytes]] = []
    buffers = [memoryview(bytearray(4)) for _ in range(4)]
    request = PullRequest(chain(4), 0, 1.0)
    result = await transport.pull(peer, request, buffers, lambda index, head, _: seen.append((index, head)))
    return result, seen


async def test_the_best_path_is_taken_and_logged_once() -> None:
    shm, ucx, grpc = Scripted("shm"), Scripted("ucx"), Scripted("grpc")
    with capture_logs() as lines:
        for _ in range(2):
            assert (await _pull(_preferred(shm, ucx, grpc)))[0].transport == "shm"
        transport = _preferred(None, ucx, grpc)
        for _ in range(3):
            assert (await _pull(transport))[0].transport == "ucx"
        assert (await _pull(transport, PeerAddress("", "h:2")))[0].transport == "grpc"
    assert transport.statistics().peers_by_transport == {"ucx": 1, "grpc": 1}
    paths = [line["transport"] for line in lines if line["event"] == "transfer path"]
    assert paths == ["shm", "shm", "ucx", "grpc"]


async def test_a_peer_on_another_host_is_not_looked_for_each_time() -> None:
    shm, ucx = Scripted("shm", error=NotHere("no")), Scripted("ucx")
    transport = _preferred(shm, ucx, Scripted("grpc"))
    for _ in range(3):
        assert (await _pull(transport))[0] == PullResult(4, STOP_COMPLETE)
    assert (len(shm.pulls), len(ucx.pulls)) == (1, 3)


async def test_blocks_elsewhere_come_over_the_network() -> None:
    shm, ucx = Scripted("shm", count=3, stop=STOP_ELSEWHERE), Scripted("ucx")
    result, seen = await _pull(_preferred(shm, ucx, Scripted("grpc")))
    assert (result, result.transport) == (PullResult(4, STOP_COMPLETE), "shm,ucx")
    assert seen == [(0, b"shm"), (1, b"shm"), (2, b"shm"), (3, b"ucx")]
    assert ucx.pulls == [1]


async def test_a_lost_peer_is_not_tried_over_another_path() -> None:
    """The caller computes; a second wait of a second would only cost time."""
    shm, ucx = Scripted("shm", error=PeerLost("gone")), Scripted("ucx")
    results = await asyncio.gather(_pull(_preferred(shm, ucx, Scripted("grpc"))), return_exceptions=True)
    assert isinstance(results[0], PeerLost)
    assert ucx.pulls == []


async def test_a_payload_in_no_region_is_pushed_over_the_network() -> None:
    shm, ucx = Scripted("shm", error=NotShown("no")), Scripted("ucx")
    transport = _preferred(shm, ucx, Scripted("grpc"))
    request = PushRequest([b"h"], [memoryview(b"data")], 0, 1.0)
    assert (await transport.push(_PEER, request)).transport == "ucx"
    shm.error = None
    assert (await transport.push(_PEER, request)).transport == "shm"
