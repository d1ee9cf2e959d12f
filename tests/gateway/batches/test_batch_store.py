"""What a sweep leaves of batches that are over."""

from __future__ import annotations

from pathlib import Path

from services.gateway.batches.batch_store import BatchStore
from services.gateway.batches.file_store import FileLimits, FileStore
from services.gateway.batches.layout import Layout, new_batch_id
from services.gateway.batches.records import COMPLETED, FAILED, BatchRecord, Final

NOW, DAY_S, LIFE_S = 1_000_000, 86_400, 30 * 86_400.0
TENANT = "one"


def over(store: BatchStore, input_file_id: str, at: int, status: str) -> str:
    """The id of a batch that began and ended then."""
    record = BatchRecord(
        id=new_batch_id(),
        tenant=TENANT,
        tenant_generation=0,
        endpoint="/v1/completions",
        input_file_id=input_file_id,
        completion_window="24h",
        created_at=at,
        expires_at=at + DAY_S,
    )
    store.create(record, at)
    assert store.finish(record, Final(status=status, at=at))
    return record.id


def test_batches_whose_files_were_wrong_go_after_a_day_and_beyond_a_hundred(tmp_path: Path) -> None:
    files = FileStore(Layout(tmp_path), FileLimits(2**20, 2**20, 10, LIFE_S))
    store = BatchStore(files, max_open=2)
    store.prepare()
    upload = files.begin(TENANT)
    upload.write(b"{}\n")
    file = upload.finish("in.jsonl", "batch", NOW, LIFE_S)
    upload.discard()
    done = over(store, file.id, NOW - 1, COMPLETED)
    failed = [over(store, file.id, NOW + number, FAILED) for number in range(103)]
    store.sweep(TENANT, NOW + 103, LIFE_S)
    assert {record.id for record in store.all(TENANT)} == {done, *failed[3:]}
    store.sweep(TENANT, NOW + 50 + DAY_S, LIFE_S)
    assert {record.id for record in store.all(TENANT)} == {done, *failed[51:]}
    store.sweep(TENANT, NOW + LIFE_S, LIFE_S)
    assert store.all(TENANT) == []
