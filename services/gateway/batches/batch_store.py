"""The batches of all tenants, in the directory that gateways share. Blocking: callers are threads.

A batch's folder holds `record`, a hard link `input` to its file, the marks `checked`, `cancelling`, `finalizing` and
`final`, and the logs of its results. Each of them is written once and by whoever comes first: the state of a batch is
what is there, any gateway can read it, and nobody can take it back.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from services.gateway.batches.durable import create, make_folder, read_record
from services.gateway.batches.file_store import FileStore, remove_folder
from services.gateway.batches.layout import Layout, is_batch_id
from services.gateway.batches.progress import Progress
from services.gateway.batches.records import FAILED, BatchRecord, BatchState, Checked, Final, Mark
from services.gateway.batches.result_log import Results, ResultWriter, Superseded, begin_generation
from services.gateway.errors import ObjectNotFound, StateConflict, TenantLimitExceeded

_RECORD, _CHECKED, _CANCELLING, _FINALIZING, _FINAL = "record", "checked", "cancelling", "finalizing", "final"
_INPUT = "input"
# Of batches whose files were not in order, which bring a tenant nothing and cost it nothing.
_FAILED_LIFE_S = 86_400.0
_MAX_FAILED = 100
# A batch is announced before it is there; one that is not there by then never will be.
_ABANDONED_S = 60.0


class BatchStore:
    """Methods raise OSError, and what else they say."""

    def __init__(self, files: FileStore, *, max_open: int) -> None:
        """max_open: batches of a tenant that are not over."""
        self.files = files
        self._layout: Layout = files.layout
        self._max_open = max_open
        self._progress = Progress()

    def prepare(self) -> None:
        """Make the folders that all tenants share, for this user alone."""
        make_folder(self._layout.root)
        make_folder(self._layout.open)
        make_folder(self._layout.tenants)

    def create(self, record: BatchRecord, now_s: float) -> BatchState:
        """Raises ObjectNotFound for the input file, TenantLimitExceeded and StorageQuotaExceeded."""
        tenant = record.tenant
        # Results are never refused, so whoever has no room left begins none.
        self.files.check_quota(tenant)
        if sum(owner == tenant for owner in self.open_batches().values()) >= self._max_open:
            raise TenantLimitExceeded(f"{self._max_open} batches of this tenant are not over")
        try:
            self.files.get(tenant, record.input_file_id, now_s)
            folder = self._layout.batch(tenant, record.id)
            make_folder(folder)
            create(self._layout.open / record.id, tenant.encode())
            os.link(self.files.path(tenant, record.input_file_id), folder / _INPUT)
        except (ObjectNotFound, FileNotFoundError):
            raise ObjectNotFound(f"No such File object: {record.input_file_id[:64]}", "input_file_id") from None
        create(folder / _RECORD, msgspec.json.encode(record))
        return BatchState(record=record)

    def get(self, tenant: str, batch_id: str) -> BatchState:
        """Raises ObjectNotFound."""
        state = self._state(self._layout.batch(tenant, batch_id)) if is_batch_id(batch_id) else None
        if state is None:
            raise ObjectNotFound(f"No such Batch object: {batch_id[:64]}", "id")
        return state

    def all(self, tenant: str) -> list[BatchRecord]:
        """The newest first."""
        with contextlib.suppress(FileNotFoundError):
            folder = self._layout.batches(tenant)
            found = (read_record(folder / name / _RECORD, BatchRecord) for name in os.listdir(folder))
            records = [record for record in found if record is not None]
            return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)
        return []

    def open_batches(self) -> dict[str, str]:
        """Tenants of the batches that are not over, by id."""
        found: dict[str, str] = {}
        for name in os.listdir(self._layout.open):
            if is_batch_id(name):
                with contextlib.suppress(FileNotFoundError):
                    found[name] = (self._layout.open / name).read_text(errors="replace")
        return found

    def cancel(self, tenant: str, batch_id: str, now_s: float) -> BatchState:
        """Have it end. Raises ObjectNotFound and StateConflict."""
        state = self.get(tenant, batch_id)
        if state.final is not None:
            raise StateConflict(f"Cannot cancel a batch with status '{state.status}'.", "id")
        create(self.folder(state.record) / _CANCELLING, msgspec.json.encode(Mark(int(now_s))))
        return self.get(tenant, batch_id)

    def folder(self, record: BatchRecord) -> Path:
        """Where a batch is."""
        return self._layout.batch(record.tenant, record.id)

    def input(self, record: BatchRecord) -> Path:
        """Its lines."""
        return self.folder(record) / _INPUT

    def is_cancelling(self, record: BatchRecord) -> bool:
        """Whether a client wants it to end."""
        return (self.folder(record) / _CANCELLING).exists()

    def begin(self, record: BatchRecord) -> tuple[Results, ResultWriter]:
        """The next generation of its results. Raises Superseded where another was faster, or has ended it."""
        results, writer = begin_generation(self.folder(record))
        with contextlib.ExitStack() as stack:
            stack.callback(writer.close)
            # The logs of a batch that is over go, and what begins without them would pass for its first generation.
            if self.final(record) is not None:
                self.close(record)
                raise Superseded
            stack.pop_all()
        return results, writer

    def note_checked(self, record: BatchRecord, checked: Checked) -> None:
        """Its lines are in order."""
        create(self.folder(record) / _CHECKED, msgspec.json.encode(checked))

    def note_finalizing(self, record: BatchRecord, now_s: float) -> None:
        """Its files of results are being made."""
        create(self.folder(record) / _FINALIZING, msgspec.json.encode(Mark(int(now_s))))

    def finish(self, record: BatchRecord, final: Final) -> bool:
        """End it; False where it has ended before."""
        is_first = create(self.folder(record) / _FINAL, msgspec.json.encode(final))
        self.close(record)
        return is_first

    def final(self, record: BatchRecord) -> Final | None:
        """How it has ended, if it has."""
        return read_record(self.folder(record) / _FINAL, Final)

    def close(self, record: BatchRecord) -> None:
        """Of one that is over, let go of what only a run needs. Idempotent."""
        folder = self.folder(record)
        for name in os.listdir(folder):
            if name == _INPUT or name.startswith("log."):
                (folder / name).unlink(missing_ok=True)
        (self._layout.open / record.id).unlink(missing_ok=True)

    def sweep(self, tenant: str, now_s: float, life_s: float) -> None:
        """Remove batches that ended so long ago, and what was announced and never came."""
        num_failed = 0
        for record in self.all(tenant):
            final = self.final(record)
            if final is None:
                continue
            has_failed = final.status == FAILED
            num_failed += has_failed
            if now_s >= final.at + (min(life_s, _FAILED_LIFE_S) if has_failed else life_s) or (
                has_failed and num_failed > _MAX_FAILED
            ):
                remove_folder(self.folder(record))
        for batch_id, owner in self.open_batches().items():
            folder, opened = self._layout.batch(owner, batch_id), self._layout.open / batch_id
            if owner == tenant and not (folder / _RECORD).exists():
                with contextlib.suppress(FileNotFoundError):
                    if now_s - opened.stat().st_mtime > _ABANDONED_S:
                        remove_folder(folder)
                        opened.unlink(missing_ok=True)

    def _state(self, folder: Path) -> BatchState | None:
        record = read_record(folder / _RECORD, BatchRecord)
        if record is None:
            return None
        checked, completed, failed = read_record(folder / _CHECKED, Checked), 0, 0
        # Read before its logs: these go when it is over.
        final = read_record(folder / _FINAL, Final)
        if checked is not None and final is None:
            with contextlib.suppress(FileNotFoundError):
                completed, failed = self._progress.of(record.id, folder)
            final = read_record(folder / _FINAL, Final)
        if final is not None:
            self._progress.forget(record.id)
        return BatchState(
            record=record,
            checked=checked,
            finalizing=read_record(folder / _FINALIZING, Mark),
            cancelling=read_record(folder / _CANCELLING, Mark),
            final=final,
            completed=completed,
            failed=failed,
        )
