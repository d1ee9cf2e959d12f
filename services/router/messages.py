"""What a router tells others of itself, as messages: models, workers, kvstores, pools."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvmesh.v1 import control_pb2, router_pb2

from services.router.catalog import CatalogEntry, Models
from services.router.control.entries import AdapterEntry, ModelEntry
from services.router.decisions import Decisions
from services.router.domain import WorkerId


def model_snapshot(models: Models) -> router_pb2.ModelSnapshot:
    """The models, and how their requests are shared out."""
    return router_pb2.ModelSnapshot(
        models=[_served_model(entry) for entry in models.entries],
        traffic=[_traffic(name, entry) for name, entry in models.registered],
        adapters=[_served_adapter(model, name, entry) for (model, name), entry in models.adapters],
        aliases=aliases(models.aliases),
    )


def aliases(pairs: Iterable[tuple[str, str]]) -> list[router_pb2.ModelAlias]:
    """Other names with the models they stand for."""
    return [router_pb2.ModelAlias(name=name, model=model) for name, model in pairs]


def pool_views(decisions: Decisions) -> list[control_pb2.PoolView]:
    """Every pool, as it was judged last."""
    return [
        control_pb2.PoolView(
            model=signal.key.model,
            role=signal.key.role,
            replicas=signal.replicas,
            desired_replicas=signal.desired,
            waiting_requests=signal.backlog.waiting_requests,
            running_requests=signal.running,
            idle_s=signal.idle_s,
        )
        for signal in decisions.pools.signals
    ]


def worker_views(decisions: Decisions) -> list[router_pb2.WorkerView]:
    """Every known worker."""
    suspect = decisions.table.suspect(time.monotonic())
    return [
        _worker_view(decisions, worker_id, is_suspect=bool(suspect[worker.row]))
        for worker_id, worker in decisions.table.workers.items()
    ]


def kvstore_views(decisions: Decisions) -> list[router_pb2.KvStoreView]:
    """Every known kvstore node."""
    return [
        router_pb2.KvStoreView(
            kvstore_id=record.id,
            epoch=record.epoch,
            pull_address=record.pull_address,
            indexed_blocks=decisions.indexed_blocks(record.location),
            release=record.release,
        )
        for record in decisions.kvstores.values()
    ]


def _worker_view(decisions: Decisions, worker_id: WorkerId, *, is_suspect: bool) -> router_pb2.WorkerView:
    worker = decisions.table.workers[worker_id]
    rows, row = decisions.table.rows, worker.row
    return router_pb2.WorkerView(
        worker_id=worker_id,
        epoch=worker.record.epoch,
        address=worker.record.grpc_address,
        model=worker.identity.model if worker.identity else worker.record.model,
        ready=bool(rows["ready"][row]),
        suspect=is_suspect,
        draining=bool(rows["draining"][row]),
        running_requests=int(rows["running"][row]),
        waiting_requests=int(rows["waiting"][row]),
        queued_prefill_tokens=int(rows["queued_tokens"][row]),
        free_blocks=int(rows["free_blocks"][row]),
        indexed_blocks=decisions.indexed_blocks(worker.record.location),
        pending_attempts=len(worker.pending),
        drained=bool(rows["drained"][row]),
        release=worker.record.release,
    )


def _served_model(entry: CatalogEntry) -> router_pb2.ServedModel:
    identity = entry.identity
    return router_pb2.ServedModel(
        name=identity.model,
        digest=identity.model_digest,
        context_length=identity.context_length,
        dtype=identity.dtype,
        kv_dtype=identity.kv_dtype,
        weight_format=identity.weight_format,
        block_tokens=identity.block_tokens,
        layout_version=identity.layout_version,
        ready_replicas=entry.ready_replicas,
        created_s=entry.created_s,
        vocab_size=identity.vocab_size,
        tokenizer_digest=identity.tokenizer_digest,
        pooling=entry.pooling,
    )


def _served_adapter(model: str, name: str, entry: AdapterEntry) -> router_pb2.ServedAdapter:
    return router_pb2.ServedAdapter(
        name=name,
        model=model,
        digest=bytes.fromhex(entry.digest),
        rank=entry.rank,
        path=entry.path,
        created_s=entry.created_s,
    )


def _traffic(name: str, entry: ModelEntry) -> router_pb2.ModelTraffic:
    return router_pb2.ModelTraffic(
        name=name,
        weighted=bool(entry.weights),
        versions=[
            router_pb2.VersionShare(digest=bytes.fromhex(digest), version=label, weight=entry.weights.get(digest, 0))
            for label, digest in sorted(entry.versions.items())
        ],
    )
