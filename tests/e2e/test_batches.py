"""Files and batches as the official client uses them, through Envoy, on a real model."""

from __future__ import annotations

import json
import time

import openai
import pytest

from tests.support.mesh import MODEL, wait_for

CHAT = "/v1/chat/completions"
# Beyond what one message between services may have.
BIG_BYTES = 20 * 2**20


def line(number: int, **fields: object) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 4, **fields}
    return json.dumps({"custom_id": f"id {number}", "method": "POST", "url": CHAT, "body": body})


def test_a_batch_from_upload_to_deletion(client: openai.OpenAI) -> None:
    text = "\n".join([line(0), line(1), line(2, temperature=9)])
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(text), "in.jsonl", "batch")
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"kind": "test"}
    )
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", within_s=120, what="its end")
    over = client.batches.retrieve(batch.id)
    assert over.request_counts is not None
    assert (over.request_counts.total, over.request_counts.completed, over.request_counts.failed) == (3, 2, 1)
    assert over.metadata == {"kind": "test"}
    assert over.completed_at is not None
    assert over.created_at <= over.completed_at <= time.time() + 5
    assert over.output_file_id is not None
    assert over.error_file_id is not None
    results = [json.loads(result) for result in client.files.content(over.output_file_id).text.splitlines()]
    assert [result["custom_id"] for result in results] == ["id 0", "id 1"]
    assert all(result["response"]["body"]["choices"][0]["message"]["content"] for result in results)
    (wrong,) = [json.loads(result) for result in client.files.content(over.error_file_id).text.splitlines()]
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("id 2", 400)
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    for file_id in (file.id, over.output_file_id, over.error_file_id):
        assert client.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(file_id)


def test_a_batch_is_cancelled(client: openai.OpenAI) -> None:
    text = "\n".join(line(number, max_tokens=2000, ignore_eos=True) for number in range(4))
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress", within_s=60, what="its begin")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "cancelled", within_s=60, what="its end")


def test_a_file_larger_than_any_message(client: openai.OpenAI) -> None:
    data = bytes(range(256)) * (BIG_BYTES // 256)
    file = client.files.create(file=("big.bin", data), purpose="batch")
    assert file.bytes == BIG_BYTES
    assert client.files.content(file.id).read() == data
    client.files.delete(file.id)


def test_mistakes_are_openais_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("in.jsonl", b"x"), purpose="assistants")
    with pytest.raises(openai.NotFoundError) as caught:
        client.batches.create(input_file_id="file-0", endpoint=CHAT, completion_window="24h")
    assert caught.value.code == "not_found"
    with pytest.raises(openai.BadRequestError):
        client.post("/files", cast_to=object, body={"purpose": "batch"})
    # Some clients send an empty object where there is nothing to say.
    with pytest.raises(openai.NotFoundError):
        client.post("/batches/batch_0/cancel", cast_to=object, body={})
