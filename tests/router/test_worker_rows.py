"""The rows by column, and who takes requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.common.registry import LocationRecord
from services.router.domain import Load, WorkerId
from services.router.policies.view import WORKER_ROW
from services.router.worker_rows import RowStore, Selection
from services.router.workers import WorkerTable
from tests.router.scenes import DIGEST, IDENTITY, IDLE, NOW_S

NAMES = ["a", "b", "c"]


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(31, 50))
def test_what_is_picked_is_what_an_index_would_give(picked: set[int], count: int) -> None:
    store, plain = RowStore(16), np.zeros(count, WORKER_ROW)
    store.grow(count)
    for row in range(31):
        store["running"][row] = plain["running"][row] = row
        store["host"][row] = plain["host"][row] = -row
        store.block("pending", "pending_by_class")[:, row] = (1, 2, 3, 4, 5, 6, row)
        plain["pending_by_class"][row] = (5, 6, row)
    rows = np.array(sorted(picked))
    found = store.pick(Selection.of(rows))
    assert len(found) == len(rows)
    for name in ("running", "host", "pending_by_class"):
        assert found[name].tolist() == plain[name][rows].tolist()


def test_a_row_that_nobody_uses_is_zero() -> None:
    store = RowStore(4)
    store.block("reported_s", "pending_by_class")[:, 1] = 7.0
    store["live"][1], store["name_hash"][1] = True, 9
    store.clear(1)
    assert WORKER_ROW.names is not None
    assert not any(store[name].any() for name in WORKER_ROW.names)


events = st.lists(
    st.tuples(
        st.sampled_from(["report", "busy", "stuck", "unready", "drain", "broken", "gone", "new", "tick", "alive"]),
        st.sampled_from(NAMES),
        st.sampled_from([0.0, 0.3, 0.9, 1.2]),
    ),
    max_size=30,
)


class Mesh:
    """A table and what happens to it."""

    def __init__(self) -> None:
        self.table = WorkerTable(pending_timeout_s=5.0)
        self.progress = 1

    def add(self, name: str, now_s: float) -> None:
        self.table.add(
            LocationRecord(kind="worker", id=name, epoch=1, host="h", grpc_address="w:1", pull_address="w:2")
        )
        self.table.identify(WorkerId(name), replace(IDENTITY, worker_id=WorkerId(name)), now_s)
        self.report(name, IDLE, now_s)

    def report(self, name: str, load: Load, now_s: float) -> None:
        if WorkerId(name) in self.table.workers:
            self.progress += 1
            self.table.report(
                WorkerId(name), load if load.progress < 0 else replace(load, progress=self.progress), now_s
            )

    def happen(self, event: str, name: str, now_s: float) -> None:
        match event:
            case "report":
                self.report(name, IDLE, now_s)
            case "busy":
                self.report(name, replace(IDLE, running_requests=2, prefill_tokens_per_s=100.0), now_s)
            case "stuck":
                self.report(name, replace(IDLE, running_requests=2, prefill_tokens_per_s=5000.0, progress=-2), now_s)
            case "unready":
                self.report(name, replace(IDLE, ready=False), now_s)
            case "drain":
                self.table.set_drains({name: 1})
            case "broken":
                self.table.broken(WorkerId(name))
            case "gone":
                self.table.forget(WorkerId(name))
            case "new":
                self.add(name, now_s)
            case "tick":
                self.table.tick(now_s)
            case "alive":
                self.table.alive(np.array([worker.row for worker in self.table.workers.values()], np.int64), now_s)


@given(events)
def test_who_is_present_is_always_who_takes_requests_now(happened: list[tuple[str, str, float]]) -> None:
    mesh, now_s = Mesh(), NOW_S
    for name in NAMES:
        mesh.add(name, now_s)
    table = mesh.table
    for event, name, pause_s in happened:
        now_s += pause_s
        mesh.happen(event, name, now_s)
        present, serving = table.present(now_s), table.serving(now_s)
        assert present.serving.tolist() == serving.tolist()
        live = table.rows["live"] & ~table.suspect(now_s)
        assert present.givers.tolist() == np.flatnonzero(live).tolist()
        model = present.of_model(table.model_number("m", DIGEST), table.rows)
        assert model.selection.rows.tolist() == np.flatnonzero(serving).tolist()
