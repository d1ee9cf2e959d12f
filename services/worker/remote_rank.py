"""A rank on another host as the front sees it: a Part whose link and life are one gRPC call of its rank host."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import NoReturn

import grpc
import grpc.aio
import msgspec
import structlog
from kvmesh.v1 import rank_host_pb2, rank_host_pb2_grpc

from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.worker.engine_messages import FromRankToFront
from services.worker.errors import ChildDied, StartFailed
from services.worker.messages import Message

BEAT_EVERY_S = 0.5
# A host that has just been started again is waited for.
_ANSWER_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 2.0
_log = structlog.get_logger()
_Call = grpc.aio.StreamStreamCall[rank_host_pb2.RankControl, rank_host_pb2.RankEvent]


class RemoteLink:
    """The front's end of the link to such a rank."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(FromRankToFront)
        self._received: deque[FromRankToFront] = deque()
        self._changed = asyncio.Event()
        self._gone = ""

    def send(self, message: Message) -> None:
        """Nothing is said to a rank."""
        raise AssertionError(f"{type(message).__name__} to a rank")

    async def receive(self) -> FromRankToFront:
        """See PartLink."""
        await self._wait()
        return self._received.popleft()

    async def receive_all(self) -> list[FromRankToFront]:
        """See PartLink."""
        await self._wait()
        messages = list(self._received)
        self._received.clear()
        return messages

    def put(self, message: bytes) -> None:
        """The rank has said this."""
        self._received.append(self._decoder.decode(message))
        self._changed.set()

    def close(self, reason: str) -> None:
        """Nothing more will come."""
        self._gone = self._gone or reason
        self._changed.set()

    async def _wait(self) -> None:
        while not self._received:
            if self._gone:
                raise ConnectionError(self._gone)
            self._changed.clear()
            await self._changed.wait()


class Leaving:
    """Whether a rank host of a replica is about to stop: the first that says so, and the seconds it leaves."""

    def __init__(self) -> None:
        self.host = ""
        self._within_s = 0.0
        self._told = asyncio.Event()

    def tell(self, host: str, within_s: float) -> None:
        """The first one counts."""
        if not self._told.is_set():
            self.host, self._within_s = host, within_s
            self._told.set()

    async def wait(self) -> float:
        """Until it is so; the seconds that are left from then on."""
        await self._told.wait()
        return self._within_s


class RemoteRank:
    """A running rank. leaving: told when its host is about to stop."""

    pid = None

    def __init__(self, role: str, address: str, secret: MeshSecret, leaving: Leaving) -> None:
        self.role = role
        self.link = RemoteLink()
        self._address = address
        self._leaving = leaving
        self._channel = open_channel(address)
        stub = rank_host_pb2_grpc.RankHostStub(self._channel)
        self._call: _Call = stub.Run(metadata=call_metadata(secret), wait_for_ready=True)  # type: ignore[call-arg]
        # A call takes one message at a time.
        self._writing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, start: rank_host_pb2.StartRank) -> None:
        """Have the host start it. Raises StartFailed with what the host says."""
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._call.write(rank_host_pb2.RankControl(start=start))
                event = await self._call.read()
                if not isinstance(event, rank_host_pb2.RankEvent):
                    raise StartFailed(f"{self._host}: {await self._call.details()}")
        except grpc.aio.AioRpcError as error:
            raise StartFailed(f"{self._host}: {error.details()}") from None
        except asyncio.InvalidStateError:
            # A write to a call that has ended says no more than that.
            raise StartFailed(f"{self._host}: {await self._call.details()}") from None
        except TimeoutError:
            raise StartFailed(f"{self._host} does not answer within {_ANSWER_TIMEOUT_S:.0f} s") from None
        _log.info("rank started", role=self.role, host=self._address, pid=event.started.pid)
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._read())]

    async def watch(self) -> NoReturn:
        """See Part."""
        raise ChildDied(await asyncio.shield(self._ended))

    async def end(self) -> None:
        """See Part: the host is told, and waited for a moment."""
        if self._tasks and not self._ended.done():
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S):
                    async with self._writing:
                        await self._call.write(rank_host_pb2.RankControl(end=rank_host_pb2.RankEnd()))
                        await self._call.done_writing()
                    await asyncio.shield(self._ended)
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._over("it was ended")
        await self._channel.close(None)

    @property
    def _host(self) -> str:
        return f"rank host {self._address}"

    async def _beat(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                async with self._writing:
                    await self._call.write(rank_host_pb2.RankControl(beat=rank_host_pb2.RankBeat()))
                await asyncio.sleep(BEAT_EVERY_S)

    async def _read(self) -> None:
        try:
            while isinstance(event := await self._call.read(), rank_host_pb2.RankEvent):
                self._take(event)
            self._over(f"the {self.role} on {self._host} ended")
        except grpc.aio.AioRpcError as error:
            self._over(f"{self._host} is gone: {error.details()}")
        except msgspec.MsgspecError as error:
            self._over(f"the {self.role} on {self._host} says what no rank says: {error}")

    def _take(self, event: rank_host_pb2.RankEvent) -> None:
        match event.WhichOneof("event"):
            case "message":
                self.link.put(event.message)
            case "ended":
                self._over(f"the {self.role} on {self._host} ended with status {event.ended.status}")
            case "leaving":
                _log.info("a rank host is about to stop", host=self._address)
                self._leaving.tell(self._address, event.leaving.within_s)

    def _over(self, reason: str) -> None:
        self.link.close(reason)
        if not self._ended.done():
            self._ended.set_result(reason)
