"""The servicer of files and batches: bodies in, bodies out. All of it is on disk; nothing here waits for a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, BinaryIO

from google.api.httpbody_pb2 import HttpBody
from kvmesh.v1.openai_pb2 import BatchRequest, FileRequest, ListBatchesRequest, ListFilesRequest
from kvmesh.v1.openai_pb2_grpc import OpenAIFilesServicer

from services.gateway.api.edge import Context, abort, as_gateway_error, metadata_of
from services.gateway.api.openai_render import JSON, encode
from services.gateway.batches.batch_store import BatchStore
from services.gateway.batches.disk import Disk
from services.gateway.batches.form import UploadForm
from services.gateway.batches.parts import Batches
from services.gateway.batches.records import FileRecord
from services.gateway.batches.requests import batch_limit, file_limit, new_batch, page, page_object, upload_life_s
from services.gateway.core import Core
from services.gateway.errors import DeadlineExceeded, FilesNotServed, InvalidRequest

_API = "files"
_LINES = "application/jsonl"
# Written, and sent, at once.
_PART_BYTES = 256 * 1024
_UPLOAD_S = 600.0
# For a reader to take one of them: a place in flight is kept meanwhile.
_PART_S = 30.0


class FilesService(OpenAIFilesServicer):
    """Translates between HttpBody and the stores. batches None: no directory is set, every call is refused."""

    def __init__(self, core: Core, batches: Batches | None, clock: Callable[[], float] = time.time) -> None:
        """clock: Unix time."""
        self._core = core
        self._batches = batches
        self._clock = clock

    async def CreateFile(self, requests: AsyncIterator[HttpBody], context: Context) -> HttpBody:
        """POST /v1/files."""
        try:
            batches = self._served()
            with self._core.place(_API, metadata_of(context)) as tenant:
                record = await self._upload(batches, tenant.name, requests)
            return _json(record.as_object())
        except Exception as error:
            await abort(context, as_gateway_error(error))

    async def ListFiles(self, request: ListFilesRequest, context: Context) -> HttpBody:
        """GET /v1/files."""

        def listed(store: BatchStore, tenant: str) -> dict[str, Any]:
            limit = file_limit(request.limit)
            if request.order not in ("", "asc", "desc"):
                raise InvalidRequest("order must be asc or desc", "order")
            found = [
                record for record in store.files.all(tenant, self._clock()) if request.purpose in ("", record.purpose)
            ]
            shown, has_more = page(found[::-1] if request.order == "asc" else found, request.after, limit)
            return page_object([record.as_object() for record in shown], has_more)

        return await self._call(context, listed)

    async def GetFile(self, request: FileRequest, context: Context) -> HttpBody:
        """GET /v1/files/{id}."""

        def found(store: BatchStore, tenant: str) -> dict[str, Any]:
            return store.files.get(tenant, request.id, self._clock()).as_object()

        return await self._call(context, found)

    async def GetFileContent(self, request: FileRequest, context: Context) -> AsyncIterator[HttpBody]:
        """GET /v1/files/{id}/content."""
        try:
            batches = self._served()
            with self._core.place(_API, metadata_of(context)) as tenant:
                file = await batches.disk.run(batches.store.files.open, tenant.name, request.id, self._clock())
                with file:
                    await _send(batches.disk, file, context)
        except Exception as error:
            await abort(context, as_gateway_error(error))
        # What is yielded waits for its reader without a deadline, so all of it has been written.
        for part in tuple[HttpBody, ...]():
            yield part

    async def DeleteFile(self, request: FileRequest, context: Context) -> HttpBody:
        """DELETE /v1/files/{id}."""

        def deleted(store: BatchStore, tenant: str) -> dict[str, Any]:
            store.files.delete(tenant, request.id, self._clock())
            return {"id": request.id, "object": "file", "deleted": True}

        return await self._call(context, deleted)

    async def CreateBatch(self, request: HttpBody, context: Context) -> HttpBody:
        """POST /v1/batches."""
        try:
            batches = self._served()
            with self._core.place(_API, metadata_of(context)) as tenant:
                now_s = self._clock()
                record = new_batch(request.data, tenant, now_s)
                state = await batches.disk.run(batches.store.create, record, now_s)
            batches.runner.wake()
            return _json(state.as_object())
        except Exception as error:
            await abort(context, as_gateway_error(error))

    async def ListBatches(self, request: ListBatchesRequest, context: Context) -> HttpBody:
        """GET /v1/batches."""

        def listed(store: BatchStore, tenant: str) -> dict[str, Any]:
            shown, has_more = page(store.all(tenant), request.after, batch_limit(request.limit))
            return page_object([store.get(tenant, record.id).as_object() for record in shown], has_more)

        return await self._call(context, listed)

    async def GetBatch(self, request: BatchRequest, context: Context) -> HttpBody:
        """GET /v1/batches/{id}."""
        return await self._call(context, lambda store, tenant: store.get(tenant, request.id).as_object())

    async def CancelBatch(self, request: BatchRequest, context: Context) -> HttpBody:
        """POST /v1/batches/{id}/cancel."""

        def cancelled(store: BatchStore, tenant: str) -> dict[str, Any]:
            return store.cancel(tenant, request.id, self._clock()).as_object()

        return await self._call(context, cancelled)

    def _served(self) -> Batches:
        if self._batches is None:
            raise FilesNotServed("this mesh serves no files and batches: its gateways have no files_dir")
        return self._batches

    async def _call(self, context: Context, work: Callable[[BatchStore, str], dict[str, Any]]) -> HttpBody:
        """The object that `work` makes, for the tenant that calls."""
        try:
            batches = self._served()
            with self._core.place(_API, metadata_of(context)) as tenant:
                return _json(await batches.disk.run(work, batches.store, tenant.name))
        except Exception as error:
            await abort(context, as_gateway_error(error))

    async def _upload(self, batches: Batches, tenant: str, requests: AsyncIterator[HttpBody]) -> FileRecord:
        """Write a body as it comes. Raises GatewayError, and what is written is removed."""
        store, disk = batches.store.files, batches.disk
        form: UploadForm | None = None
        held = bytearray()
        try:
            async with asyncio.timeout(_UPLOAD_S):
                async for message in requests:
                    form = form or UploadForm(message.content_type, lambda: store.begin(tenant))
                    held += message.data
                    if len(held) >= _PART_BYTES:
                        await disk.run(form.feed, bytes(held))
                        held.clear()
            if form is None:
                raise InvalidRequest("the body is empty")
            await disk.run(form.feed, bytes(held))
            upload = form.close()
            life_s = upload_life_s(form.fields, store.limits.life_s)
            name = form.filename or "upload.jsonl"
            return await disk.run(upload.finish, name, form.fields["purpose"], self._clock(), life_s)
        except TimeoutError:
            raise DeadlineExceeded("the file did not arrive in time") from None
        finally:
            if form is not None:
                await disk.run(form.discard)


async def _send(disk: Disk, file: BinaryIO, context: Context) -> None:
    """All of a file. Raises DeadlineExceeded for a reader who does not take its parts."""
    while part := await disk.run(file.read, _PART_BYTES):
        try:
            async with asyncio.timeout(_PART_S):
                await context.write(HttpBody(content_type=_LINES, data=part))
        except TimeoutError:
            raise DeadlineExceeded("the file was not read in time") from None


def _json(value: Any) -> HttpBody:
    return HttpBody(content_type=JSON, data=encode(value))
