"""Small meshes for tests of the router's pure parts."""

from __future__ import annotations

import os
from dataclasses import replace

from services.common.announcements import Header, Kind, Tier, unpack_xor
from services.common.blocks import BlockId
from services.common.registry import LocationRecord
from services.router.admission import AdmissionConfig
from services.router.domain import (
    Ask,
    AttemptId,
    HolderLinks,
    Identity,
    Load,
    MeasuredLink,
    Placement,
    Refused,
    WorkerId,
)
from services.router.holders import Holders
from services.router.index.replica import Replica
from services.router.placement import PlacementConfig, Placer
from services.router.worker_state import PendingAttempt
from services.router.workers import WorkerTable

DIGEST = b"d" * 16
NOW_S = 100.0

IDENTITY = Identity(
    worker_id=WorkerId(""),
    epoch=1,
    model="m",
    model_digest=DIGEST,
    context_length=8192,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    weight_format="gguf",
    block_tokens=16,
    layout_version=1,
    vocab_size=100,
    tokenizer_digest=b"t",
    total_blocks=10_000,
    block_bytes=400_000,
    prefill_tokens_per_s=2000.0,
    decode_step_s=0.02,
    step_token_budget=256,
    max_running_requests=16,
)
IDLE = Load(
    progress=1,
    ready=True,
    draining=False,
    running_requests=0,
    waiting_requests=0,
    queued_prefill_tokens=0,
    decoding_sequences=0,
    free_blocks=10_000,
)


def links(*locations: str, bytes_per_s: float = 1e9, ssd_bytes_per_s: float = 0.0, **fields: float) -> Load:
    """An idle worker that has just measured its links to `locations`; all other figures are those of `fields`."""
    setup_s, freshness = fields.get("setup_s", 0.004), fields.get("freshness", 1.0)
    ssd = MeasuredLink(ssd_bytes_per_s, 0.005, freshness) if ssd_bytes_per_s else None
    memory = MeasuredLink(bytes_per_s, setup_s, freshness)
    queue_bytes = fields.get("in_flight_bytes", 0.0)
    return replace(
        IDLE, holders=tuple(HolderLinks(f"{location}@1", memory, ssd, queue_bytes) for location in locations)
    )


def chain(length: int) -> list[BlockId]:
    return [BlockId(os.urandom(16)) for _ in range(length)]


class Scene:
    """Workers, kvstores, an index and a placer."""

    def __init__(self, *, policy: str = "predicted_ttft", max_queue_s: float = 30.0) -> None:
        self.table = WorkerTable(pending_timeout_s=5.0)
        self.replica = Replica()
        self.kvstores: dict[str, LocationRecord] = {}
        self.holders = Holders(self.replica, self.table, self.kvstores)
        self.placer = Placer(PlacementConfig(policy, AdmissionConfig(max_queue_s)), self.table, self.holders)
        self.waiting_tokens = 0.0
        self._asks = 0

    def worker(
        self,
        name: str,
        load: Load = IDLE,
        identity: Identity = IDENTITY,
        *,
        host: str = "h",
        pull_address: str | None = None,
    ) -> None:
        worker_id = WorkerId(name)
        address = f"{name}:2" if pull_address is None else pull_address
        record = LocationRecord(
            kind="worker", id=name, epoch=1, host=host, grpc_address=f"{name}:1", pull_address=address
        )
        self.table.add(record)
        self.table.identify(worker_id, replace(identity, worker_id=worker_id), NOW_S)
        self.table.report(worker_id, load, NOW_S)
        self.holders.changed()

    def kvstore(self, name: str, *, host: str = "h") -> None:
        self.kvstores[name] = LocationRecord(
            kind="kvstore", id=name, epoch=1, host=host, grpc_address=f"{name}:1", pull_address=f"{name}:2"
        )
        self.holders.changed()

    def hold(self, location: str, ids: list[BlockId], tier: Tier = Tier.HBM) -> None:
        known = self.replica.locations.get(location)
        seq = known.seq + 1 if known else 1
        kind = Kind.CHANGE if known else Kind.STAGED | Kind.BEGIN | Kind.COMMIT
        count, xor = (known.num_blocks, known.held.xor) if known else (0, 0)
        for id_ in ids:
            xor ^= unpack_xor(id_)
        self.replica.apply(location, Header(1, seq, kind, count + len(ids), xor), [(id_, tier) for id_ in ids], [])

    def ask(self, ids: list[BlockId], *, tokens: int = 0, **fields: object) -> Ask:
        self._asks += 1
        ask = Ask(
            id=AttemptId(f"r{self._asks}", 1),
            model="m",
            model_digest=DIGEST,
            block_ids=ids,
            prompt_tokens=tokens or len(ids) * 16 + 5,
            max_output_tokens=64,
        )
        return replace(ask, **fields)  # type: ignore[arg-type]

    def place(self, ask: Ask, now_s: float = NOW_S, *, count: bool = False) -> Placement | Refused:
        answer = self.placer.place(ask, now_s, waiting_tokens=self.waiting_tokens)
        if count and isinstance(answer, Placement):
            pending = PendingAttempt.of(answer, now_s, priority=ask.priority, tpot_s=ask.tpot_objective_s)
            self.table.grant(answer.worker_id, ask.id, pending)
        return answer

    def grant(self, ask: Ask, now_s: float = NOW_S, *, count: bool = False) -> Placement:
        answer = self.place(ask, now_s, count=count)
        assert isinstance(answer, Placement), answer
        return answer

    def refusal(self, ask: Ask, now_s: float = NOW_S) -> Refused:
        answer = self.place(ask, now_s)
        assert isinstance(answer, Refused), answer
        return answer
