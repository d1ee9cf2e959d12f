"""Batches at one gateway between Valkey and a scripted worker: what lines become, who sees what, every early end."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.api.httpbody_pb2 import HttpBody
from kvmesh.v1.common_pb2 import PRIORITY_CLASS_BATCH
from kvmesh.v1.openai_pb2 import BatchRequest, FileRequest, ListBatchesRequest, ListFilesRequest
from kvmesh.v1.openai_pb2_grpc import OpenAIFilesStub
from kvmesh.v1.router_pb2 import REFUSAL_REASON_NO_WORKER, REFUSAL_REASON_TOO_LARGE, Refusal

from services.common.bearer_keys import hash_key
from services.gateway.batches import runner, service
from services.gateway.batches.durable import make_folder
from services.gateway.batches.input_lines import InputLine, InputLines
from services.gateway.batches.layout import new_batch_id, new_file_id
from services.gateway.batches.line_run import MAX_FAILURES
from services.gateway.batches.records import BatchRecord, FileRecord
from services.gateway.text.text_model import TextModel
from tests.gateway.conftest import ANSWER, Mesh, running_mesh
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE_S, eventually, eventually_async

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"
KEYS = {"one": "kvm-key-of-tenant-one", "two": "kvm-key-of-tenant-two"}
OVER = ("completed", "failed", "expired", "cancelled")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(text_model: TextModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    folder = Path(tmp_path_factory.mktemp("b"))
    server = Valkey(folder)
    server.start()
    keys, tenants = folder / "keys", folder / "tenants.toml"
    keys.write_text("".join(f"{hash_key(key)} {tenant}\n" for tenant, key in KEYS.items()))
    # A batch has no objectives, whatever its tenant's are.
    tenants.write_text("[default.objectives.batch]\nttft_s = 0.000001\n")
    limits = {"max_file_bytes": 20_000, "max_tenant_batches": 2, "max_batch_requests": 20}
    try:
        async with running_mesh(
            text_model,
            redis_url=server.url,
            files_dir=folder / "files",
            keys_file=keys,
            tenants_file=tenants,
            **limits,
        ) as mesh:
            yield mesh
    finally:
        server.stop()


class Client:
    """The API as one tenant."""

    def __init__(self, mesh: Mesh, tenant: str) -> None:
        self._stub = OpenAIFilesStub(mesh.channel)
        self._options: dict[str, Any] = {"metadata": (("authorization", f"Bearer {KEYS[tenant]}"),), "timeout": 60}

    async def call(self, method: str, request: Any) -> dict[str, Any]:
        answer: HttpBody = await getattr(self._stub, method)(request, **self._options)
        value: dict[str, Any] = json.loads(answer.data)
        return value

    async def upload(self, data: bytes, purpose: str = "batch", **fields: str) -> dict[str, Any]:
        parts = b"".join(
            b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), value.encode())
            for name, value in {"purpose": purpose, **fields}.items()
        )
        parts += b'--b\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' + data
        body = parts + b"\r\n--b--\r\n"

        async def sent() -> AsyncIterator[HttpBody]:
            for start in range(0, len(body), 700):
                yield HttpBody(content_type="multipart/form-data; boundary=b", data=body[start : start + 700])

        return await self.call("CreateFile", sent())

    async def content(self, file_id: str) -> bytes:
        parts = self._stub.GetFileContent(FileRequest(id=file_id), **self._options)
        return b"".join([part.data async for part in parts])

    async def results(self, file_id: str | None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (await self.content(file_id)).splitlines()] if file_id else []

    async def batch(self, data: bytes, **fields: Any) -> dict[str, Any]:
        file = await self.upload(data)
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", **fields}
        return await self.call("CreateBatch", HttpBody(data=json.dumps(body).encode()))

    async def over(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def is_over() -> bool:
            found.update(await self.call("GetBatch", BatchRequest(id=batch_id)))
            return found["status"] in OVER

        await eventually_async(is_over, every_s=0.05)
        return found

    async def error(self, method: str, request: Any) -> tuple[grpc.StatusCode, str | None, str | None]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(method, request)
        trailing = {key: str(value) for key, value in caught.value.trailing_metadata()}
        error = json.loads(trailing["x-openai-error"])["error"]
        return caught.value.code(), error["code"], error["param"]


def line(custom_id: str, **body: Any) -> bytes:
    request = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": request}).encode()


def lines(count: int, **body: Any) -> bytes:
    return b"\n".join(line(f"id-{number}", **body) for number in range(count))


def assert_nothing_open(mesh: Mesh) -> None:
    batches = mesh.gateway.batches
    assert batches is not None
    assert batches.store.open_batches() == {}
    assert batches.runner.num_lines == 0


async def test_each_line_has_its_answer_or_its_own_error(mesh: Mesh) -> None:
    client = Client(mesh, "one")
    wrong = [line("temperature", temperature=7), line("model", model="nobody"), line("stream", stream=True)]
    urgent = line("urgent", priority="interactive", kvmesh={"ttft_s": 0.001})
    batch = await client.batch(b"\n".join([lines(5), *wrong, urgent]), metadata={"kind": "test"})
    assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"kind": "test"})
    over = await client.over(batch["id"])
    assert (over["status"], over["request_counts"]) == ("completed", {"total": 9, "completed": 6, "failed": 3})
    results = await client.results(over["output_file_id"])
    assert [result["custom_id"] for result in results] == [f"id-{number}" for number in range(5)] + ["urgent"]
    for result in results:
        assert (result["error"], result["response"]["status_code"]) == (None, 200)
        assert result["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
    assert len({result["id"] for result in results} | {result["response"]["request_id"] for result in results}) == 12
    used = [result["response"]["body"]["usage"]["completion_tokens"] for result in results]
    assert over["usage"]["output_tokens"] == sum(used)
    errors = {result["custom_id"]: result["response"] for result in await client.results(over["error_file_id"])}
    assert {name: response["status_code"] for name, response in errors.items()} == {
        "temperature": 400,
        "model": 404,
        "stream": 400,
    }
    assert errors["temperature"]["body"]["error"]["param"] == "temperature"
    for worker in mesh.workers:
        assert all(request.priority == PRIORITY_CLASS_BATCH for request in worker.requests)
    assert sum(len(worker.requests) for worker in mesh.workers) == 6
    assert (await client.call("GetFile", FileRequest(id=over["output_file_id"])))["purpose"] == "batch_output"
    assert_nothing_open(mesh)


async def test_a_file_that_is_not_in_order_fails_its_batch(mesh: Mesh) -> None:
    client = Client(mesh, "one")
    over = await client.over((await client.batch(lines(2) + b"\n{\n" + line("id-0")))["id"])
    assert (over["status"], over["output_file_id"], over["error_file_id"]) == ("failed", None, None)
    assert [(error["code"], error["line"]) for error in over["errors"]["data"]] == [
        ("invalid_json_line", 3),
        ("duplicate_custom_id", 4),
    ]
    assert not any(worker.requests for worker in mesh.workers)


async def test_another_tenants_files_and_batches_are_not_there(mesh: Mesh) -> None:
    one, two = Client(mesh, "one"), Client(mesh, "two")
    batch = await one.batch(lines(1))
    over = await one.over(batch["id"])
    gone = (grpc.StatusCode.NOT_FOUND, "not_found", "id")
    for method, request in (
        ("GetFile", FileRequest(id=batch["input_file_id"])),
        ("GetFile", FileRequest(id="file-../../t.one/files/x")),
        ("DeleteFile", FileRequest(id=over["output_file_id"])),
        ("GetBatch", BatchRequest(id=batch["id"])),
        ("CancelBatch", BatchRequest(id=batch["id"])),
    ):
        assert await two.error(method, request) == gone
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await two.content(over["output_file_id"])
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    wanted = HttpBody(data=json.dumps(body).encode())
    assert await two.error("CreateBatch", wanted) == (grpc.StatusCode.NOT_FOUND, "not_found", "input_file_id")
    assert (await two.call("ListBatches", ListBatchesRequest()))["data"] == []
    assert (await two.call("ListFiles", ListFilesRequest()))["data"] == []


async def test_pages(mesh: Mesh) -> None:
    client = Client(mesh, "one")
    for _ in range(3):
        await client.over((await client.batch(lines(1)))["id"])
    whole = [batch["id"] for batch in (await client.call("ListBatches", ListBatchesRequest(limit=100)))["data"]]
    first = await client.call("ListBatches", ListBatchesRequest(limit=2))
    rest = await client.call("ListBatches", ListBatchesRequest(limit=100, after=first["last_id"]))
    assert [batch["id"] for batch in first["data"] + rest["data"]] == whole
    assert (first["has_more"], rest["has_more"], first["first_id"]) == (True, False, whole[0])
    files = await client.call("ListFiles", ListFilesRequest(purpose="batch"))
    assert {file["purpose"] for file in files["data"]} == {"batch"}
    upwards = await client.call("ListFiles", ListFilesRequest(purpose="batch", order="asc"))
    assert [file["id"] for file in upwards["data"]] == [file["id"] for file in files["data"]][::-1]
    for wanted in (ListBatchesRequest(limit=101), ListBatchesRequest(limit=-1)):
        assert (await client.error("ListBatches", wanted))[2] == "limit"
    assert (await client.error("ListBatches", ListBatchesRequest(after="batch_x")))[2] == "after"


async def test_requests_that_are_wrong(mesh: Mesh) -> None:
    client = Client(mesh, "one")
    file = await client.upload(lines(1))
    good = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    for changes, param in (
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {}}, "output_expires_after"),
        ({"input_file_id": 5}, None),
    ):
        body = HttpBody(data=json.dumps({**good, **changes}).encode())
        assert (await client.error("CreateBatch", body))[::2] == (grpc.StatusCode.INVALID_ARGUMENT, param)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.upload(b"x" * 20_001)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for fields in ({"purpose": "assistants"}, {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.upload(b"x", **fields)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    short = await client.upload(b"x", **fields)
    assert short["expires_at"] == short["created_at"] + 3600


async def test_cancelling_ends_what_runs_and_keeps_what_is_answered(mesh: Mesh) -> None:
    client = Client(mesh, "one")
    batch = await client.batch(lines(2))
    await client.over(batch["id"])
    mesh.say(ANSWER, hang_after=1)
    batch = await client.batch(lines(6))
    await eventually(lambda: sum(worker.running for worker in mesh.workers) >= 4)
    state = await client.call("CancelBatch", BatchRequest(id=batch["id"]))
    assert state["status"] in ("cancelling", "cancelled")
    over = await client.over(batch["id"])
    assert (over["status"], over["request_counts"]) == ("cancelled", {"total": 6, "completed": 0, "failed": 6})
    errors = await client.results(over["error_file_id"])
    assert [error["custom_id"] for error in errors] == [f"id-{number}" for number in range(6)]
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    # Kept for nobody: nothing of it is computed on.
    await eventually(lambda: not any(worker.running for worker in mesh.workers))
    assert sum(worker.cancelled for worker in mesh.workers) >= 4
    assert (await client.error("CancelBatch", BatchRequest(id=batch["id"])))[0] is grpc.StatusCode.ABORTED
    assert_nothing_open(mesh)


async def test_lines_that_wait_for_a_turn_are_not_in_memory(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    client, read, really_read = Client(mesh, "one"), list[int](), InputLines.read

    def noted(lines: InputLines, number: int) -> InputLine:
        read.append(number)
        return really_read(lines, number)

    monkeypatch.setattr(InputLines, "read", noted)
    mesh.say(ANSWER, hang_after=1)
    batch = await client.batch(lines(6))
    await eventually(lambda: sum(worker.running for worker in mesh.workers) >= 4)
    assert sorted(read) == [0, 1, 2, 3]
    await client.call("CancelBatch", BatchRequest(id=batch["id"]))
    assert (await client.over(batch["id"]))["status"] == "cancelled"


async def test_a_batch_whose_time_is_over_expires(mesh: Mesh) -> None:
    client, batches = Client(mesh, "one"), mesh.gateway.batches
    assert batches is not None
    file = await client.upload(lines(3))
    late = BatchRecord(
        id=new_batch_id(),
        tenant="one",
        tenant_generation=0,
        endpoint=CHAT,
        input_file_id=file["id"],
        completion_window="24h",
        created_at=file["created_at"],
        expires_at=file["created_at"] - 1,
    )
    batches.store.create(late, file["created_at"])
    over = await client.over(late.id)
    assert (over["status"], over["request_counts"]) == ("expired", {"total": 3, "completed": 0, "failed": 3})
    assert {error["error"]["code"] for error in await client.results(over["error_file_id"])} == {"batch_expired"}
    assert over["expired_at"] is not None


async def test_lines_wait_for_what_may_come_back(mesh: Mesh) -> None:
    """No worker, full tenants and deleted input: none of them is the lines' error."""
    client = Client(mesh, "one")
    mesh.router.refusal = Refusal(reason=REFUSAL_REASON_NO_WORKER, retry_after_s=0.1)
    batch = await client.batch(lines(3))
    await client.call("DeleteFile", FileRequest(id=batch["input_file_id"]))
    await eventually(lambda: len(mesh.router.asks) >= 2)
    state = await client.call("GetBatch", BatchRequest(id=batch["id"]))
    assert (state["status"], state["request_counts"]["failed"]) == ("in_progress", 0)
    mesh.router.refusal = None
    over = await client.over(batch["id"])
    assert over["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


async def test_a_line_that_no_worker_has_room_for_is_an_error_before_its_batch_expires(mesh: Mesh) -> None:
    client = Client(mesh, "one")
    mesh.router.refusal = Refusal(reason=REFUSAL_REASON_TOO_LARGE, retry_after_s=0.01)
    over = await client.over((await client.batch(lines(2)))["id"])
    assert (over["status"], over["request_counts"]) == ("completed", {"total": 2, "completed": 0, "failed": 2})
    errors = await client.results(over["error_file_id"])
    assert {error["response"]["body"]["error"]["code"] for error in errors} == {"model_unavailable"}
    assert len(mesh.router.asks) == 2 * MAX_FAILURES
    assert all(ask.knows_too_large for ask in mesh.router.asks)


async def test_no_more_batches_than_a_tenant_may_have_open(mesh: Mesh) -> None:
    client = Client(mesh, "one")
    mesh.say(ANSWER, hang_after=0)
    batches = [await client.batch(lines(1)) for _ in range(2)]
    body = {"input_file_id": batches[0]["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    refused = await client.error("CreateBatch", HttpBody(data=json.dumps(body).encode()))
    assert refused[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
    for batch in batches:
        await client.call("CancelBatch", BatchRequest(id=batch["id"]))
        await client.over(batch["id"])


async def test_no_tenant_has_all_places(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [runner.max_of_a_tenant(8, tenants) for tenants in (1, 2, 3, 8)] == [4, 2, 2, 1]
    one, two, batches = Client(mesh, "one"), Client(mesh, "two"), mesh.gateway.batches
    assert batches is not None
    monkeypatch.setattr(batches.runner, "_max_running", 2)
    mesh.say(ANSWER, hang_after=1)
    first = [await one.batch(lines(1)) for _ in range(2)]
    await eventually(lambda: sum(worker.running for worker in mesh.workers) == 1)
    second = await two.batch(lines(1))
    await eventually(lambda: sum(worker.running for worker in mesh.workers) == 2)
    shown = [(await one.call("GetBatch", BatchRequest(id=batch["id"])))["status"] for batch in first]
    assert sorted(shown) == ["in_progress", "validating"]
    for client, batch in ((one, first[0]), (one, first[1]), (two, second)):
        await client.call("CancelBatch", BatchRequest(id=batch["id"]))
        await client.over(batch["id"])
    assert_nothing_open(mesh)


async def test_a_record_that_cannot_be_read_is_its_tenants_trouble_alone(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, batches = Client(mesh, "one"), Client(mesh, "two"), mesh.gateway.batches
    assert batches is not None
    folder = batches.store.files.layout.files("two")
    make_folder(folder)
    rotten = folder / f"{new_file_id()}.json"
    rotten.write_bytes(b'{"id": "\xff')
    try:
        monkeypatch.setattr(runner, "_SWEEP_S", 0.0)
        for _ in range(2):
            over = await one.over((await one.batch(lines(1)))["id"])
            assert over["status"] == "completed"
        failed = await two.error("ListFiles", ListFilesRequest())
        assert failed[:2] == (grpc.StatusCode.UNAVAILABLE, "storage_unavailable")
    finally:
        rotten.unlink()
    assert (await two.call("ListFiles", ListFilesRequest()))["object"] == "list"


async def test_no_batch_waits_for_a_sweep(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    client, batches = Client(mesh, "one"), mesh.gateway.batches
    assert batches is not None
    folder = batches.store.files.layout.files("two")
    make_folder(folder)
    # Who opens it to read or to write waits for the other.
    record = folder / f"{new_file_id()}.json"
    os.mkfifo(record)
    is_sweeping, may_end = threading.Event(), threading.Event()

    def hold_up() -> None:
        with record.open("wb"):
            is_sweeping.set()
            may_end.wait(PATIENCE_S)

    holding = asyncio.get_running_loop().run_in_executor(None, hold_up)
    try:
        monkeypatch.setattr(runner, "_SWEEP_S", 0.0)
        batches.runner.wake()
        await eventually(is_sweeping.is_set)
        over = await client.over((await client.batch(lines(2)))["id"])
        assert over["status"] == "completed"
        assert not may_end.is_set()
    finally:
        # No further sweep may find it.
        monkeypatch.setattr(runner, "_SWEEP_S", 3600.0)
        descriptor = os.open(record, os.O_RDONLY | os.O_NONBLOCK)
        may_end.set()
        await holding
        os.close(descriptor)
        record.unlink()


async def test_who_does_not_read_a_file_gives_its_place_back(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = mesh.gateway.batches
    assert batches is not None
    monkeypatch.setattr(service, "_PART_S", 0.2)
    files, file_id, size = batches.store.files, new_file_id(), 64 * 2**20
    make_folder(files.layout.files("one"))
    written = files.layout.files("one") / ".written"
    written.touch()
    # More than all buffers on the way hold.
    os.truncate(written, size)
    record = FileRecord(id=file_id, filename="f", purpose="batch_output", bytes=size, created_at=int(time.time()))
    files.add("one", record, written)
    written.unlink()
    metadata = (("authorization", f"Bearer {KEYS['one']}"),)
    call = OpenAIFilesStub(mesh.channel).GetFileContent(FileRequest(id=file_id), metadata=metadata)
    assert (await call.read()).data
    await eventually(lambda: not mesh.gateway.core.admission.total)
    call.cancel()
    files.discard("one", file_id)
