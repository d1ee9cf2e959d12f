"""Who ends a batch with which files, when two runs of it overlap and when the file system fails."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.gateway.batches.batch_store import BatchStore
from services.gateway.batches.file_store import FileLimits, FileStore
from services.gateway.batches.input_lines import InputLines, check_lines
from services.gateway.batches.layout import Layout, new_batch_id
from services.gateway.batches.line_run import LineAnswer, result_line
from services.gateway.batches.records import COMPLETED, BatchRecord, FileRecord, Final
from services.gateway.batches.result_files import finish
from services.gateway.batches.result_log import ResultWriter, Superseded, generations
from services.gateway.errors import StorageQuotaExceeded

NOW_S = 1_000_000.0
TENANT, URL, LINES = "one", "/v1/completions", 3


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    files = FileStore(Layout(tmp_path), FileLimits(10_000, 10_000, max_tenant_files=9, life_s=60.0))
    made = BatchStore(files, max_open=2)
    made.prepare()
    return made


def new_file(store: BatchStore) -> FileRecord:
    """Lines that are in order."""
    upload = store.files.begin(TENANT)
    for number in range(LINES):
        line = {"custom_id": str(number), "method": "POST", "url": URL, "body": {}}
        upload.write(msgspec.json.encode(line) + b"\n")
    file = upload.finish("in", "batch", NOW_S, 60.0)
    upload.discard()
    return file


def batch_of(file: FileRecord) -> BatchRecord:
    return BatchRecord(
        id=new_batch_id(),
        tenant=TENANT,
        tenant_generation=0,
        endpoint=URL,
        input_file_id=file.id,
        completion_window="24h",
        created_at=int(NOW_S),
        expires_at=int(NOW_S) + 60,
    )


def new_batch(store: BatchStore) -> tuple[BatchRecord, InputLines]:
    """A batch that has not begun."""
    record = batch_of(new_file(store))
    store.create(record, NOW_S)
    return record, check_lines(store.input(record), URL, LINES)


def answer_all(record: BatchRecord, writer: ResultWriter) -> None:
    for number in range(LINES):
        writer.append(number, result_line(record, number, str(number), LineAnswer(200, "r", b"{}")), is_ok=True)


def output(store: BatchStore, final: Final) -> list[bytes]:
    """Lines of the file that a batch has ended with."""
    assert final.output_file_id is not None
    with store.files.open(TENANT, final.output_file_id, NOW_S) as file:
        return file.readlines()


def test_a_run_that_is_taken_over_at_its_end_leaves_the_files_to_the_next(store: BatchStore) -> None:
    record, lines = new_batch(store)
    first, writer = store.begin(record)
    answer_all(record, writer)
    second, other = store.begin(record)
    with pytest.raises(Superseded):
        finish(store, record, lines, first, COMPLETED, NOW_S)
    final = finish(store, record, lines, second, COMPLETED, NOW_S)
    assert len(output(store, final)) == LINES
    assert store.get(TENANT, record.id).final == final
    writer.close()
    other.close()


def test_files_that_a_batch_has_ended_with_stay_whatever_fails_after_it(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, lines = new_batch(store)
    results, writer = store.begin(record)
    answer_all(record, writer)
    writer.close()

    def fail(_: object) -> None:
        raise OSError("no longer there")

    monkeypatch.setattr(store, "close", fail)
    with pytest.raises(OSError, match="no longer there"):
        finish(store, record, lines, results, COMPLETED, NOW_S)
    final = store.final(record)
    assert final is not None
    assert len(output(store, final)) == LINES


def test_files_of_a_batch_that_could_not_end_go(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record, lines = new_batch(store)
    results, writer = store.begin(record)
    answer_all(record, writer)
    writer.close()

    def fail(*_: object) -> bool:
        raise OSError("full")

    monkeypatch.setattr(store, "finish", fail)
    with pytest.raises(OSError, match="full"):
        finish(store, record, lines, results, COMPLETED, NOW_S)
    assert [file.id for file in store.files.all(TENANT, NOW_S)] == [record.input_file_id]


def test_a_run_that_comes_once_the_batch_is_over_begins_nothing(store: BatchStore) -> None:
    record, lines = new_batch(store)
    results, writer = store.begin(record)
    answer_all(record, writer)
    writer.close()
    final = finish(store, record, lines, results, COMPLETED, NOW_S)
    with pytest.raises(Superseded):
        store.begin(record)
    assert generations(store.folder(record)) == []
    assert len(output(store, final)) == LINES


def test_a_tenant_without_room_begins_no_batch(store: BatchStore) -> None:
    file = new_file(store)
    store.create(batch_of(file), NOW_S)
    # As results do, which are never refused.
    (store.files.layout.files(TENANT) / "file-of-results").write_bytes(b"x" * 10_000)
    with pytest.raises(StorageQuotaExceeded):
        store.create(batch_of(file), NOW_S)
    assert len(store.open_batches()) == 1
