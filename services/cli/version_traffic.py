"""The versions of one public name, by the control API of a mesh's routers: labels, traffic weights, drained workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvmesh.v1 import control_pb2 as pb
from kvmesh.v1 import router_pb2

from services.cli.control_client import ControlClient
from services.cli.errors import CliError

_POLL_S = 0.1
_APPLIES_WITHIN_S = 30.0


class VersionTraffic:
    """Methods raise CliError."""

    def __init__(self, client: ControlClient, name: str) -> None:
        self._client = client
        self._name = name

    async def of_all_routers(self) -> list[pb.ModelVersions]:
        """What each router that answers knows of the name."""
        request = pb.ListModelVersionsRequest()
        replies, errors = await self._client.all_of(lambda stub, options: stub.ListModels(request, **options))
        if errors or not replies:
            raise CliError(f"no answer of {', '.join(errors) or 'any router'}")
        return [
            next((model for model in reply.models if model.name == self._name), pb.ModelVersions(name=self._name))
            for reply in replies.values()
        ]

    async def now(self) -> pb.ModelVersions:
        """What the first router that answers knows."""
        return (await self.of_all_routers())[0]

    async def register(self, digest: str, label: str = "") -> str:
        """Give a digest a label; empty: its first digits. Returns the label."""
        request = pb.RegisterModelRequest(name=self._name, digest=digest, version=label)
        model = await self._client.first(lambda stub, options: stub.RegisterModel(request, **options))
        return next(version.version for version in model.versions if version.digest == digest)

    async def unregister(self, digest: str) -> None:
        """Forget the label of a version without traffic."""
        request = pb.UnregisterModelRequest(name=self._name, version=digest)
        await self._client.first(lambda stub, options: stub.UnregisterModel(request, **options))

    async def set_weights(self, weights: dict[str, int]) -> None:
        """By digest; none: every digest gets traffic again. Returns once every router has them."""
        request = pb.SetTrafficRequest(name=self._name, weights=weights)
        await self._client.first(lambda stub, options: stub.SetTraffic(request, **options))

        def applies(model: pb.ModelVersions) -> bool:
            return {one.digest: one.weight for one in model.versions if one.weight} == weights

        await self.until(applies, "every router has the new traffic weights")

    async def until(
        self, condition: Callable[[pb.ModelVersions], bool], what: str, within_s: float = _APPLIES_WITHIN_S
    ) -> None:
        """Wait until it holds on every router; one that does not answer is asked again."""

        async def holds() -> bool:
            try:
                return all(map(condition, await self.of_all_routers()))
            except CliError:
                return False

        await until(holds, what, within_s)

    async def undrain(self, worker_id: str) -> None:
        """New requests for it again."""
        undrain = pb.UndrainWorkerRequest(worker_id=worker_id)
        await self._client.first(lambda stub, options: stub.Undrain(undrain, **options))

    async def drain(self, worker_id: str, within_s: float) -> None:
        """No new requests for a worker, until it starts anew; returns when it has none left on any router."""
        drain = pb.DrainWorkerRequest(worker_id=worker_id)
        await self._client.first(lambda stub, options: stub.Drain(drain, **options))

        async def is_idle() -> bool:
            replies, errors = await self._client.all_of(_list)
            views = [view for reply in replies.values() for view in reply.workers if view.worker_id == worker_id]
            return not errors and all(view.drained and not _open_requests(view) for view in views)

        await until(is_idle, f"the requests of {worker_id} have ended", within_s)


async def until(condition: Callable[[], Awaitable[bool]], what: str, within_s: float) -> None:
    """Poll a condition. Raises CliError with what did not come about."""
    try:
        async with asyncio.timeout(within_s):
            while not await condition():
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise CliError(f"not within {within_s:g} s: {what}") from None


async def _list(stub: Any, options: dict[str, Any]) -> pb.ListResponse:
    answer: pb.ListResponse = await stub.List(pb.ListRequest(), **options)
    return answer


def _open_requests(view: router_pb2.WorkerView) -> int:
    return view.running_requests + view.waiting_requests + view.pending_attempts
