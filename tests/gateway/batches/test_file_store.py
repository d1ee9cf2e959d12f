"""Files on disk, with a clock of the test's own: limits, expiry, tenants, and what dead writers leave."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.batches.file_store import FileLimits, FileStore, Upload
from services.gateway.batches.form import UploadForm
from services.gateway.batches.layout import Layout
from services.gateway.batches.records import FileRecord
from services.gateway.errors import FileTooLarge, GatewayError, InvalidRequest, ObjectNotFound, StorageQuotaExceeded

NOW_S = 1_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(Layout(tmp_path), FileLimits(max_bytes=100, max_tenant_bytes=150, max_tenant_files=3, life_s=60.0))


def upload(store: FileStore, data: bytes, tenant: str = "one") -> FileRecord:
    writing = store.begin(tenant)
    try:
        writing.write(data)
        return writing.finish("name", "batch", NOW_S, 60.0)
    finally:
        writing.discard()


def test_a_file_is_there_once_it_is_complete_and_until_it_expires(store: FileStore) -> None:
    writing = store.begin("one")
    writing.write(b"abc")
    assert store.all("one", NOW_S) == []
    record = writing.finish("name", "batch", NOW_S, 60.0)
    writing.discard()
    assert store.all("one", NOW_S) == [store.get("one", record.id, NOW_S)] == [record]
    with store.open("one", record.id, NOW_S + 59) as file:
        assert file.read() == b"abc"
    for tenant, file_id, at_s in (("two", record.id, NOW_S), ("one", record.id, NOW_S + 60), ("one", "../x", NOW_S)):
        with pytest.raises(ObjectNotFound):
            store.open(tenant, file_id, at_s)
    assert store.sweep("one", NOW_S + 59) == 0
    assert store.sweep("one", NOW_S + 60) == 1
    assert list(store.layout.files("one").iterdir()) == []


def test_a_file_that_is_read_may_be_deleted(store: FileStore) -> None:
    record = upload(store, b"abc")
    with store.open("one", record.id, NOW_S) as file:
        store.delete("one", record.id, NOW_S)
        assert file.read() == b"abc"
    with pytest.raises(ObjectNotFound):
        store.delete("one", record.id, NOW_S)


def test_limits(store: FileStore) -> None:
    with pytest.raises(FileTooLarge):
        upload(store, b"x" * 101)
    upload(store, b"x" * 100)
    with pytest.raises(StorageQuotaExceeded):
        upload(store, b"x" * 51)
    upload(store, b"x" * 100, tenant="two")
    upload(store, b"x" * 50)
    with pytest.raises(StorageQuotaExceeded):
        upload(store, b"x")
    assert store.used("one") == (150, 2)
    assert sorted(os.listdir(store.layout.tenants)) == ["t.one", "t.two"]


def test_what_a_dead_writer_left_goes_after_a_while(store: FileStore) -> None:
    writing = store.begin("one")
    writing.write(b"abc")
    written_s = next(store.layout.files("one").iterdir()).stat().st_mtime
    store.sweep("one", written_s + 60)
    assert len(os.listdir(store.layout.files("one"))) == 1
    store.sweep("one", written_s + 3601)
    assert os.listdir(store.layout.files("one")) == []
    writing.discard()


BODY = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\ncontent-type: x/y\r\n\r\n'
    b"first\r\n--not a border\r\nsecond\r\n--b--\r\n"
)


def parsed(store: FileStore, parts: list[bytes]) -> tuple[dict[str, str], str, bytes]:
    form = UploadForm('multipart/form-data; boundary="b"', lambda: store.begin("one"))
    try:
        for part in parts:
            form.feed(part)
        record = form.close().finish(form.filename, form.fields["purpose"], NOW_S, 60.0)
        with store.open("one", record.id, NOW_S) as file:
            content = file.read()
        store.delete("one", record.id, NOW_S)
        return form.fields, form.filename, content
    finally:
        form.discard()


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, len(BODY)), max_size=8))
def test_a_form_is_the_same_however_it_is_cut(cuts: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    limits = FileLimits(max_bytes=100, max_tenant_bytes=150, max_tenant_files=3, life_s=60.0)
    places = [0, *sorted(cuts), len(BODY)]
    parts = [BODY[start:end] for start, end in pairwise(places)]
    found = parsed(FileStore(Layout(tmp_path_factory.getbasetemp() / "forms"), limits), parts)
    assert found == ({"purpose": "batch"}, "in.jsonl", b"first\r\n--not a border\r\nsecond")


@pytest.mark.parametrize(
    "body",
    [
        BODY[:-10],
        b"text",
        BODY[: BODY.index(b"--b\r\nContent")] + b"--b--\r\n",
        BODY.replace(b'"purpose"', b'"file"'),
        BODY.replace(b"batch", b"b" * 1025),
    ],
)
def test_a_form_that_is_wrong_leaves_nothing(store: FileStore, body: bytes) -> None:
    with pytest.raises(GatewayError):
        parsed(store, [body])
    assert store.used("one") == (0, 0)


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data"])
def test_another_body_is_no_form(content_type: str) -> None:
    def begin() -> Upload:
        raise AssertionError("nothing is to be written")

    with pytest.raises(InvalidRequest):
        UploadForm(content_type, begin)
