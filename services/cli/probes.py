"""Whether a process is ready, by asking it: gRPC health, Valkey's PING, Envoy's own readiness."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.plan import ProcessSpec

PROBE_TIMEOUT_S = 1.0


async def is_ready(spec: ProcessSpec, redis_password: str) -> bool:
    """Ask one process; silence, refusal and "not serving" are all False."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            if spec.kind == "valkey":
                return await valkey_reply(spec.address, redis_password, "PING") == "+PONG"
            if spec.kind == "envoy":
                return await http_status(spec.admin, "/ready") == 200
            return await _grpc_serving(spec.address)
    except (OSError, TimeoutError, ValueError, grpc.aio.AioRpcError):
        return False


async def are_ready(specs: Iterable[ProcessSpec], redis_password: str) -> dict[str, bool]:
    """Ask several at once; by name."""
    asked = list(specs)
    answers = await asyncio.gather(*(is_ready(spec, redis_password) for spec in asked))
    return {spec.name: answer for spec, answer in zip(asked, answers, strict=True)}


async def http_status(address: str, path: str, method: str = "GET") -> int:
    """Status of a plain HTTP request to "host:port". Raises OSError; the caller sets the deadline."""
    status, _ = await http_exchange(address, path, method)
    return status


async def http_exchange(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body of a plain HTTP request to "host:port"."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        writer.write(head.encode())
        answer = (await reader.read()).decode(errors="replace")
    finally:
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    if not head.startswith("HTTP/1."):
        raise ConnectionError(f"{address} closed the connection")
    return int(head.split(" ", 2)[1]), body


async def _grpc_serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S
        )
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def valkey_reply(address: str, password: str, command: str) -> str:
    """The first line that Valkey answers to a command. Raises OSError; the caller sets the deadline."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"AUTH {password}\r\n{command}\r\n".encode())
        await reader.readline()
        return (await reader.readline()).decode().strip()
    finally:
        writer.close()
