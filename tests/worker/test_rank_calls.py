"""Ranks call their worker: who has the token gets through, whoever else calls keeps nobody waiting."""

from __future__ import annotations

import asyncio
import socket

import pytest

from services.common.settings import ConfigurationError
from services.worker.config import WorkerSettings, check_settings
from services.worker.errors import StartFailed
from services.worker.rank_calls import RankCalls, call_worker, listening

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
        ({"rank_hosts": "h:1", "engine": "sim"}, "a simulated worker has no such thing"),
    ],
)
def test_rank_hosts_that_cannot_be(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_settings(WorkerSettings(**given))


def test_rank_hosts_that_can_be() -> None:
    check_settings(WorkerSettings(pipeline_parallel=3, rank_hosts="a:1, b:2", staging_bytes=2**20))
    check_settings(WorkerSettings(tensor_parallel=2, pipeline_parallel=3, rank_hosts=("a:1", "a:1")))
