"""Ranks call their worker: who has the token gets through, whoever else calls keeps nobody waiting."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from services.common.settings import ConfigurationError
from services.worker import rank_calls
from services.worker.config import WorkerSettings, check_settings
from services.worker.errors import StartFailed
from services.worker.rank_calls import RankCalls, call_worker, listening, reachable_host

HOST, PATIENCE_S = "127.0.0.1", 60.0


async def test_a_rank_gets_its_link_past_callers_who_say_nothing_or_lie() -> None:
    async with RankCalls(HOST) as calls:
        silent = socket.create_connection((HOST, int(calls.address.rpartition(":")[2])))
        liar = await call_worker(calls.address, bytes(32), 1, PATIENCE_S)
        rank = await call_worker(calls.address, calls.token, 1, PATIENCE_S)
        twice = await call_worker(calls.address, calls.token, 1, PATIENCE_S)
        link = await calls.link(1, PATIENCE_S)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            await loop.sock_sendall(link, b"step")
            assert await loop.sock_recv(rank, 4) == b"step"
            assert await loop.sock_recv(liar, 1) == b"", "it is let go"
            assert await loop.sock_recv(twice, 1) == b"", "a rank has one link"
        for sock in (silent, liar, rank, twice):
            sock.close()


async def test_a_caller_whose_call_cannot_be_taken_keeps_no_later_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    accept, failed = loop.sock_accept, asyncio.Event()

    async def fails_once(listener: socket.socket) -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", fails_once)
    async with RankCalls(HOST) as calls:
        await failed.wait()
        with await call_worker(calls.address, calls.token, 1, PATIENCE_S):
            await calls.link(1, PATIENCE_S)


async def test_no_more_callers_are_listened_to_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_calls, "_MOST_GREETINGS", 1)
    loop = asyncio.get_running_loop()
    async with RankCalls(HOST) as calls:
        silent = await loop.run_in_executor(None, socket.create_connection, ("127.0.0.1", port(calls)))
        with silent, await call_worker(calls.address, calls.token, 1, PATIENCE_S):
            with pytest.raises(StartFailed, match="did not call"):
                await calls.link(1, 0.2)
            silent.close()
            await calls.link(1, PATIENCE_S)


def port(calls: RankCalls) -> int:
    return int(calls.address.rpartition(":")[2])


async def test_a_host_may_be_a_literal_ipv6_address() -> None:
    host = reachable_host(WorkerSettings(listen="[::1]:0"))
    assert host == reachable_host(WorkerSettings(advertise_host="::1")) == "::1"
    async with RankCalls(host) as calls:
        assert calls.address.startswith("[::1]:")
        with await call_worker(calls.address, calls.token, 1, PATIENCE_S):
            await calls.link(1, PATIENCE_S)


async def test_a_rank_that_does_not_call_ends_the_start() -> None:
    async with RankCalls(HOST) as calls:
        with pytest.raises(StartFailed, match="rank 3 did not call within 0 s"):
            await calls.link(3, 0.01)


async def test_addresses_of_nobody() -> None:
    with pytest.raises(StartFailed, match=r"cannot listen on 192\.0\.2\.1"):
        listening("192.0.2.1")
    with listening(HOST) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(OSError, match="Connect call failed"):
        await call_worker(f"{HOST}:{port}", bytes(32), 1, PATIENCE_S)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank_hosts": "10.0.0.2:9400"}, "1 processes do not divide over 2 hosts; pipeline_parallel sets stages"),
        ({"pipeline_parallel": 3, "rank_hosts": "h:1"}, "rank_hosts='h:1': 3 processes do not divide over 2 hosts"),
        ({"pipeline_parallel": 2, "rank_hosts": "h"}, "'h' is no HOST:PORT"),
        (
            {"pipeline_parallel": 2, "rank_hosts": "h:1", "listen": "0.0.0.0:0"},
            "listen='0.0.0.0:0': advertise_host must say",
        ),
        (
            {"pipeline_parallel": 2, "rank_hosts": "h:1", "staging_bytes": 2**29 + 1},
            "staging_bytes=536870913: at most 536870912",
        ),
        ({"rank_hosts": "h:1", "engine": "sim"}, "a simulated worker has no such thing"),
    ],
)
def test_rank_hosts_that_cannot_be(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_settings(WorkerSettings(**given))


def test_rank_hosts_that_can_be() -> None:
    check_settings(WorkerSettings(pipeline_parallel=3, rank_hosts="a:1, b:2", staging_bytes=2**20))
    check_settings(WorkerSettings(tensor_parallel=2, pipeline_parallel=3, rank_hosts=("a:1", "a:1")))
