"""The Control service: who may call, proto to domain and back."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message
from kvmesh.v1 import control_pb2, control_pb2_grpc, router_pb2

from services.common.bearer_keys import AUTHORIZATION
from services.router.control.admin_keys import AdminKeys
from services.router.control.messages import adapter_view, decision_record, model_versions
from services.router.control.plane import ControlPlane
from services.router.control.usage import UsageReader
from services.router.decisions import Decisions
from services.router.errors import (
    ConflictError,
    FailedPreconditionError,
    InvalidOperationError,
    LabelTakenError,
    OperatorError,
    RedisSilentError,
    UnknownError,
)
from services.router.messages import aliases, kvstore_views, pool_views, worker_views

Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply", bound=Message)
_STATUS = {
    InvalidOperationError: grpc.StatusCode.INVALID_ARGUMENT,
    LabelTakenError: grpc.StatusCode.ALREADY_EXISTS,
    FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    UnknownError: grpc.StatusCode.NOT_FOUND,
    ConflictError: grpc.StatusCode.ABORTED,
    RedisSilentError: grpc.StatusCode.UNAVAILABLE,
}
_log = structlog.get_logger()


class ControlService(control_pb2_grpc.ControlServicer):
    """Serves operators."""

    def __init__(self, plane: ControlPlane, decisions: Decisions, usage: UsageReader, keys: AdminKeys) -> None:
        self._plane = plane
        self._decisions = decisions
        self._usage = usage
        self._keys = keys

    async def RegisterModel(
        self, request: control_pb2.RegisterModelRequest, context: Context
    ) -> control_pb2.ModelVersions:
        """See the proto."""

        async def work() -> control_pb2.ModelVersions:
            return model_versions(await self._plane.register(request.name, request.digest, request.version))

        return await self._changed(context, "register", request.name, work)

    async def UnregisterModel(
        self, request: control_pb2.UnregisterModelRequest, context: Context
    ) -> control_pb2.ModelVersions:
        """See the proto."""

        async def work() -> control_pb2.ModelVersions:
            return model_versions(await self._plane.unregister(request.name, request.version))

        return await self._changed(context, "unregister", request.name, work)

    async def SetTraffic(self, request: control_pb2.SetTrafficRequest, context: Context) -> control_pb2.ModelVersions:
        """See the proto."""

        async def work() -> control_pb2.ModelVersions:
            return model_versions(await self._plane.set_traffic(request.name, dict(request.weights)))

        return await self._changed(context, "traffic", request.name, work)

    async def Rollback(self, request: control_pb2.RollbackRequest, context: Context) -> control_pb2.ModelVersions:
        """See the proto."""

        async def work() -> control_pb2.ModelVersions:
            return model_versions(await self._plane.rollback(request.name))

        return await self._changed(context, "rollback", request.name, work)

    async def Drain(self, request: control_pb2.DrainWorkerRequest, context: Context) -> router_pb2.WorkerView:
        """See the proto."""

        async def work() -> router_pb2.WorkerView:
            await self._plane.drain(request.worker_id)
            return self._worker(request.worker_id)

        return await self._changed(context, "drain", request.worker_id, work)

    async def Undrain(self, request: control_pb2.UndrainWorkerRequest, context: Context) -> router_pb2.WorkerView:
        """See the proto."""

        async def work() -> router_pb2.WorkerView:
            await self._plane.undrain(request.worker_id)
            return self._worker(request.worker_id)

        return await self._changed(context, "undrain", request.worker_id, work)

    async def AddAdapter(self, request: control_pb2.AddAdapterRequest, context: Context) -> control_pb2.AdapterView:
        """See the proto."""

        async def work() -> control_pb2.AdapterView:
            return adapter_view(
                await self._plane.add_adapter(
                    request.model, request.name, digest=request.digest, rank=request.rank, path=request.path
                )
            )

        return await self._changed(context, "add adapter", f"{request.model}:{request.name}", work)

    async def RemoveAdapter(
        self, request: control_pb2.RemoveAdapterRequest, context: Context
    ) -> control_pb2.AdapterView:
        """See the proto."""

        async def work() -> control_pb2.AdapterView:
            return adapter_view(await self._plane.remove_adapter(request.model, request.name))

        return await self._changed(context, "remove adapter", f"{request.model}:{request.name}", work)

    async def ListAdapters(
        self, request: control_pb2.ListAdaptersRequest, context: Context
    ) -> control_pb2.ListAdaptersResponse:
        """See the proto."""
        await self._owner(context)
        return control_pb2.ListAdaptersResponse(adapters=map(adapter_view, self._plane.adapters()))

    async def SetAlias(self, request: control_pb2.SetAliasRequest, context: Context) -> control_pb2.AliasList:
        """See the proto."""

        async def work() -> control_pb2.AliasList:
            await self._plane.set_alias(request.name, request.model)
            return self._aliases()

        return await self._changed(context, "alias", request.name, work)

    async def ListAliases(self, request: control_pb2.ListAliasesRequest, context: Context) -> control_pb2.AliasList:
        """See the proto."""
        await self._owner(context)
        return self._aliases()

    async def ListPools(self, request: control_pb2.ListPoolsRequest, context: Context) -> control_pb2.ListPoolsResponse:
        """See the proto."""
        await self._owner(context)
        self._decisions.pools.update(time.monotonic())
        return control_pb2.ListPoolsResponse(pools=pool_views(self._decisions))

    async def GetUsage(self, request: control_pb2.GetUsageRequest, context: Context) -> control_pb2.GetUsageResponse:
        """See the proto."""
        await self._owner(context)
        try:
            return control_pb2.GetUsageResponse(rows=await self._usage.rows(request))
        except OperatorError as error:
            await context.abort(_STATUS[type(error)], str(error))

    async def ListModels(
        self, request: control_pb2.ListModelVersionsRequest, context: Context
    ) -> control_pb2.ListModelVersionsResponse:
        """See the proto."""
        await self._owner(context)
        return control_pb2.ListModelVersionsResponse(models=map(model_versions, self._plane.models()))

    async def List(self, request: control_pb2.ListRequest, context: Context) -> control_pb2.ListResponse:
        """See the proto."""
        await self._owner(context)
        return control_pb2.ListResponse(
            models=map(model_versions, self._plane.models()),
            workers=worker_views(self._decisions),
            kvstores=kvstore_views(self._decisions),
            redis_connected=self._decisions.redis_connected,
        )

    async def Explain(self, request: control_pb2.ExplainRequest, context: Context) -> control_pb2.ExplainResponse:
        """See the proto."""
        await self._owner(context)
        decisions = self._decisions.explanations.of(request.request_id)
        if not decisions:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no decision on this request, or none any more")
        now_s = time.monotonic()
        return control_pb2.ExplainResponse(decisions=[decision_record(one, now_s) for one in decisions])

    async def _changed(
        self, context: Context, operation: str, target: str, work: Callable[[], Awaitable[Reply]]
    ) -> Reply:
        """Do what an operator wants, if it is one; every outcome is logged with who it was."""
        owner = await self._owner(context)
        try:
            reply = await work()
        except OperatorError as error:
            _log.warning("control refused", operation=operation, target=target, owner=owner, reason=str(error))
            await context.abort(_STATUS[type(error)], str(error))
        _log.info("control", operation=operation, target=target, owner=owner)
        return reply

    async def _owner(self, context: Context) -> str:
        """Whose admin key the call carries; ends the call when it carries none."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        owner = self._keys.owner_of(metadata.get(AUTHORIZATION, ""), time.monotonic())
        if owner is None:
            reason = "an admin key is needed" if self._keys.is_open else "the router has no admin_keys_file"
            _log.warning("control refused", reason=reason)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        return owner

    def _aliases(self) -> control_pb2.AliasList:
        return control_pb2.AliasList(aliases=aliases(sorted(self._plane.table.aliases.items())))

    def _worker(self, worker_id: str) -> router_pb2.WorkerView:
        """Raises UnknownError where it has gone meanwhile."""
        for view in worker_views(self._decisions):
            if view.worker_id == worker_id:
                return view
        raise UnknownError(f"the worker {worker_id[:100]!r} has gone")
