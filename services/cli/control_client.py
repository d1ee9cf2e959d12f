"""Calls to the control API: of the first router that answers, or of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from kvmesh.v1 import control_pb2_grpc

from services.cli.errors import CliError
from services.common.bearer_keys import bearer
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret

if TYPE_CHECKING:
    from kvmesh.v1.control_pb2_grpc import ControlAsyncStub

_TIMEOUT_S = 10.0
_TRY_ANOTHER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
Reply = TypeVar("Reply")
# What a command does with a stub; the dictionary holds the timeout and metadata of each call.
Work = Callable[["ControlAsyncStub", dict[str, Any]], Awaitable[Reply]]


class ControlClient:
    """Routers of one mesh, and what proves that they may be told what to do."""

    def __init__(self, routers: Sequence[str], secret: MeshSecret, admin_key: str) -> None:
        if not routers:
            raise CliError("the mesh has no router")
        self._routers = list(dict.fromkeys(routers))
        self._secret = secret
        self._admin_key = admin_key

    def call(self, work: Work[Reply]) -> Reply:
        """What the first router that answers says. Raises CliError with its refusal, or why none answers."""
        return asyncio.run(self.first(work))

    def everywhere(self, work: Work[Reply]) -> tuple[dict[str, Reply], dict[str, grpc.aio.AioRpcError]]:
        """Answers by router, and errors by router."""
        return asyncio.run(self.all_of(work))

    async def first(self, work: Work[Reply]) -> Reply:
        """`call` inside a running loop."""
        reason = ""
        for router in self._routers:
            try:
                return await self._ask(router, work)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _TRY_ANOTHER:
                    raise CliError(str(error.details())) from None
                reason = describe(router, error)
        raise CliError(reason)

    async def all_of(self, work: Work[Reply]) -> tuple[dict[str, Reply], dict[str, grpc.aio.AioRpcError]]:
        """`everywhere` inside a running loop."""
        replies: dict[str, Reply] = {}
        errors: dict[str, grpc.aio.AioRpcError] = {}

        async def one(router: str) -> None:
            try:
                replies[router] = await self._ask(router, work)
            except grpc.aio.AioRpcError as error:
                errors[router] = error

        await asyncio.gather(*map(one, self._routers))
        return replies, errors

    async def _ask(self, router: str, work: Work[Reply]) -> Reply:
        async with open_channel(router) as channel:
            stub: Any = control_pb2_grpc.ControlStub(channel)
            metadata = (*call_metadata(self._secret), bearer(self._admin_key))
            return await work(stub, {"timeout": _TIMEOUT_S, "metadata": metadata})


def describe(router: str, error: grpc.aio.AioRpcError) -> str:
    """One line on why a router gave no answer."""
    return f"router {router}: {error.code().name}: {error.details()}"
