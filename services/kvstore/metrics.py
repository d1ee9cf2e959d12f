"""What a kvstore node counts: OpenTelemetry instruments, and the totals that `Stats` reports."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry import metrics

_meter = metrics.get_meter("kvmesh.kvstore")
_hits = _meter.create_counter("kvmesh_kvstore_hit_blocks", description="Blocks asked for and lent, by tier.")
_misses = _meter.create_counter("kvmesh_kvstore_miss_blocks", description="Blocks asked for that were not here.")
_sent = _meter.create_counter("kvmesh_kvstore_sent_bytes", description="Payload sent to pullers, by tier.")
_pushed = _meter.create_counter("kvmesh_kvstore_pushed_blocks", description="Blocks taken in.")
_received = _meter.create_counter("kvmesh_kvstore_received_bytes", description="Payload taken in.")
_evicted = _meter.create_counter("kvmesh_kvstore_evicted_blocks", description="Blocks that went for others.")
_rejected = _meter.create_counter("kvmesh_kvstore_rejected_blocks", description="Offered blocks not kept, by reason.")
_failed = _meter.create_counter("kvmesh_kvstore_verification_failures", description="Bad blocks dropped, by reason.")
_leases = _meter.create_up_down_counter("kvmesh_kvstore_open_leases", description="Pulls that hold blocks now.")
_stored = _meter.create_up_down_counter("kvmesh_kvstore_stored_blocks", description="Blocks held now, by tier.")
_stored_bytes = _meter.create_up_down_counter("kvmesh_kvstore_stored_bytes", description="Bytes held now, by tier.")
_pull_s = _meter.create_histogram("kvmesh_kvstore_pull_seconds", unit="s", description="Time that a pull held blocks.")

RAM = {"tier": "ram"}


@dataclass(slots=True)
class Totals:
    """Counts since start."""

    hit_blocks: int = 0
    miss_blocks: int = 0
    pushed_blocks: int = 0
    evicted_blocks: int = 0
    rejected_blocks: int = 0
    verification_failures: int = 0
    open_leases: int = 0

    def leased(self, hits: int, misses: int) -> None:
        """A pull begins."""
        self.hit_blocks += hits
        self.miss_blocks += misses
        self.open_leases += 1
        _hits.add(hits, RAM)
        _misses.add(misses)
        _leases.add(1)

    def released(self, num_bytes: int, duration_s: float) -> None:
        """A pull has ended; num_bytes were sent."""
        self.open_leases -= 1
        _leases.add(-1)
        _sent.add(num_bytes, RAM)
        _pull_s.record(duration_s)

    def kept(self, blocks: int, num_bytes: int) -> None:
        """Blocks were taken in."""
        self.pushed_blocks += blocks
        _pushed.add(blocks)
        _received.add(num_bytes)
        _stored.add(blocks, RAM)
        _stored_bytes.add(num_bytes, RAM)

    def evicted(self, blocks: int, num_bytes: int) -> None:
        """Blocks went for others."""
        self.evicted_blocks += blocks
        _evicted.add(blocks)
        _stored.add(-blocks, RAM)
        _stored_bytes.add(-num_bytes, RAM)

    def rejected(self, blocks: int, reason: str) -> None:
        """Offered blocks were not kept."""
        if blocks:
            self.rejected_blocks += blocks
            _rejected.add(blocks, {"reason": reason})

    def failed_verification(self, reason: str) -> None:
        """A block is not what its header says."""
        self.verification_failures += 1
        _failed.add(1, {"reason": reason})
