"""What a kvstore node counts: OpenTelemetry instruments, and the totals that `Stats` reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry import metrics

from services.kvstore.latencies import Latencies

_meter = metrics.get_meter("kvmesh.kvstore")
_hits = _meter.create_counter("kvmesh_kvstore_hit_blocks", description="Blocks asked for and lent, by tier.")
_misses = _meter.create_counter("kvmesh_kvstore_miss_blocks", description="Blocks asked for that were not here.")
_sent = _meter.create_counter("kvmesh_kvstore_sent_bytes", description="Payload sent to pullers, by tier.")
_pushed = _meter.create_counter("kvmesh_kvstore_pushed_blocks", description="Blocks taken in.")
_received = _meter.create_counter("kvmesh_kvstore_received_bytes", description="Payload taken in.")
_evicted = _meter.create_counter("kvmesh_kvstore_evicted_blocks", description="Blocks that went for others.")
_cleared = _meter.create_counter("kvmesh_kvstore_cleared_blocks", description="Blocks dropped with their owner.")
_rejected = _meter.create_counter("kvmesh_kvstore_rejected_blocks", description="Offered blocks not kept, by reason.")
_failed = _meter.create_counter("kvmesh_kvstore_verification_failures", description="Bad blocks dropped, by reason.")
_leases = _meter.create_up_down_counter("kvmesh_kvstore_open_leases", description="Pulls that hold blocks now.")
_stored = _meter.create_up_down_counter("kvmesh_kvstore_stored_blocks", description="Blocks held now, by tier.")
_stored_bytes = _meter.create_up_down_counter("kvmesh_kvstore_stored_bytes", description="Bytes held now, by tier.")
_pull_s = _meter.create_histogram("kvmesh_kvstore_pull_seconds", unit="s", description="Time that a pull held blocks.")

_spilled = _meter.create_counter("kvmesh_kvstore_spilled_blocks", description="Blocks written to the SSD.")
_spill_s = _meter.create_histogram("kvmesh_kvstore_spill_seconds", unit="s", description="Time of a write to the SSD.")
_loaded = _meter.create_counter("kvmesh_kvstore_ssd_read_bytes", description="Payload read from the SSD.")
_dropped = _meter.create_counter("kvmesh_kvstore_dropped_blocks", description="Blocks that left RAM unwritten.")
_copied = _meter.create_counter("kvmesh_kvstore_copied_blocks", description="Blocks copied out of old segments.")
_switched_off = _meter.create_counter("kvmesh_kvstore_ssd_switched_off", description="Errors that ended the SSD tier.")

_asked_copies = _meter.create_counter(
    "kvmesh_kvstore_replication_asked", description="Copies that others were asked to make, by their answer."
)
_refused_copies = _meter.create_counter(
    "kvmesh_kvstore_replication_refused", description="Copies that this node was asked to make and would not."
)
_failed_copies = _meter.create_counter(
    "kvmesh_kvstore_replication_failures", description="Copies that ended before the whole chain was here, by reason."
)
_replicated = _meter.create_counter("kvmesh_kvstore_replicated_blocks", description="Blocks copied from other nodes.")
_replicated_bytes = _meter.create_counter("kvmesh_kvstore_replicated_bytes", description="Payload of these.")
_partial = _meter.create_counter(
    "kvmesh_kvstore_dropped_partial_blocks", description="Blocks of which not all heads came, by reason."
)

RAM = {"tier": "ram"}
SSD = {"tier": "ssd"}
_BY_TIER = (_hits, _sent, _evicted, _cleared, _stored, _stored_bytes)
_PLAIN = (
    *(_misses, _pushed, _received, _rejected, _failed, _leases, _spilled, _loaded, _dropped, _copied, _switched_off),
    *(_asked_copies, _refused_copies, _failed_copies, _replicated, _replicated_bytes, _partial),
)


def show_at_zero() -> None:
    """Have every count on `/metrics` from the start, so that a rate over it sees the first event too."""
    for counter in _BY_TIER:
        counter.add(0, RAM)
        counter.add(0, SSD)
    for counter in _PLAIN:
        counter.add(0)


@dataclass(slots=True)
class Totals:
    """Counts since start."""

    hit_blocks: int = 0
    ssd_hit_blocks: int = 0
    miss_blocks: int = 0
    pushed_blocks: int = 0
    evicted_blocks: int = 0
    rejected_blocks: int = 0
    verification_failures: int = 0
    open_leases: int = 0
    dropped_partial_blocks: int = 0
    cleared_blocks: int = 0
    # Why there is no SSD tier though one was wanted.
    ssd_fault: str = ""
    # Of pulls that sent something, by the slowest tier that it came from.
    pulls: dict[str, Latencies] = field(default_factory=lambda: {"ram": Latencies(), "ssd": Latencies()})

    def ssd_refused(self, fault: str) -> None:
        """The SSD cannot be opened."""
        self.ssd_fault = fault
        _switched_off.add(1)

    def leased(self, ram_hits: int, ssd_hits: int, misses: int) -> None:
        """A pull begins."""
        self.hit_blocks += ram_hits + ssd_hits
        self.ssd_hit_blocks += ssd_hits
        self.miss_blocks += misses
        self.open_leases += 1
        _hits.add(ram_hits, RAM)
        _hits.add(ssd_hits, SSD)
        _misses.add(misses)
        _leases.add(1)

    def released(self, ram_bytes: int, ssd_bytes: int, duration_s: float) -> None:
        """A pull has ended; this much was sent."""
        self.open_leases -= 1
        _leases.add(-1)
        _sent.add(ram_bytes, RAM)
        _sent.add(ssd_bytes, SSD)
        if ram_bytes or ssd_bytes:
            self._pulled(SSD if ssd_bytes else RAM, duration_s)

    def _pulled(self, labels: dict[str, str], duration_s: float) -> None:
        self.pulls[labels["tier"]].record(duration_s)
        _pull_s.record(duration_s, labels)

    def was_read(self, blocks: int, num_bytes: int, duration_s: float) -> None:
        """A peer on this host has read blocks in RAM by itself."""
        self.hit_blocks += blocks
        _hits.add(blocks, RAM)
        _sent.add(num_bytes, RAM)
        self._pulled(RAM, duration_s)

    def kept(self, blocks: int, num_bytes: int) -> None:
        """Blocks were taken in."""
        self.pushed_blocks += blocks
        _pushed.add(blocks)
        _received.add(num_bytes)
        self.held(blocks, num_bytes)

    def held(self, blocks: int, num_bytes: int) -> None:
        """RAM holds this much more, or less."""
        _stored.add(blocks, RAM)
        _stored_bytes.add(num_bytes, RAM)

    def evicted(self, blocks: int, num_bytes: int) -> None:
        """Blocks went for others."""
        self.evicted_blocks += blocks
        _evicted.add(blocks, RAM)
        _stored.add(-blocks, RAM)
        _stored_bytes.add(-num_bytes, RAM)

    def cleared(self, blocks: int, num_bytes: int) -> None:
        """Blocks went with their owner."""
        self.cleared_blocks += blocks
        _cleared.add(blocks, RAM)
        self.held(-blocks, -num_bytes)

    def rejected(self, blocks: int, reason: str) -> None:
        """Offered blocks were not kept."""
        if blocks:
            self.rejected_blocks += blocks
            _rejected.add(blocks, {"reason": reason})

    def dropped_partials(self, blocks: int, reason: str) -> None:
        """Blocks went before all their heads had come."""
        self.dropped_partial_blocks += blocks
        _partial.add(blocks, {"reason": reason})

    def failed_verification(self, reason: str) -> None:
        """A block is not what its header says."""
        self.verification_failures += 1
        _failed.add(1, {"reason": reason})


@dataclass(slots=True)
class SsdTotals:
    """Counts of the SSD tier since start."""

    spilled_blocks: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    dropped_blocks: int = 0
    copied_blocks: int = 0
    reclaimed_blocks: int = 0
    cleared_blocks: int = 0
    verification_failures: int = 0
    open_s: float = 0.0

    def spilled(self, blocks: int, num_bytes: int, duration_s: float) -> None:
        """Blocks were written."""
        self.spilled_blocks += blocks
        _spilled.add(blocks)
        _spill_s.record(duration_s)
        self.held(blocks, num_bytes)

    def held(self, blocks: int, num_bytes: int) -> None:
        """The SSD holds this much more, or less."""
        _stored.add(blocks, SSD)
        _stored_bytes.add(num_bytes, SSD)

    def was_read(self, blocks: int, num_bytes: int) -> None:
        """Blocks were brought into RAM."""
        self.read_blocks += blocks
        self.read_bytes += num_bytes
        _loaded.add(num_bytes)

    def dropped(self, blocks: int) -> None:
        """Blocks left RAM before they could be written, or do not fit."""
        self.dropped_blocks += blocks
        _dropped.add(blocks)

    def copied(self, blocks: int) -> None:
        """Blocks were copied out of a segment that goes."""
        self.copied_blocks += blocks
        _copied.add(blocks)

    def reclaimed(self, blocks: int) -> None:
        """Blocks went with their segment."""
        self.reclaimed_blocks += blocks
        _evicted.add(blocks, SSD)

    def cleared(self, blocks: int) -> None:
        """Blocks went with their owner."""
        self.cleared_blocks += blocks
        _cleared.add(blocks, SSD)

    def failed_verification(self, reason: str) -> None:
        """A block on the SSD is not what was written."""
        self.verification_failures += 1
        _failed.add(1, {"reason": reason, **SSD})

    def switched_off(self) -> None:
        """The tier has ended."""
        _switched_off.add(1)


@dataclass(slots=True)
class ReplicationTotals:
    """Counts of copies since start, those asked of others and those made here."""

    asked_copies: int = 0
    declined_copies: int = 0
    refused_copies: int = 0
    failed_copies: int = 0
    replicated_blocks: int = 0
    replicated_bytes: int = 0

    def asked(self, answer: str) -> None:
        """A node was asked, or would have been: "accepted", "held" already, or why there will be no copy."""
        self.asked_copies += 1
        self.declined_copies += answer not in ("accepted", "held")
        _asked_copies.add(1, {"answer": answer})

    def refused(self, reason: str) -> None:
        """This node would not make a copy."""
        self.refused_copies += 1
        _refused_copies.add(1, {"reason": reason})

    def failed(self, reason: str) -> None:
        """A copy ended early."""
        self.failed_copies += 1
        _failed_copies.add(1, {"reason": reason})

    def replicated(self, blocks: int, num_bytes: int) -> None:
        """Blocks of a copy are here."""
        self.replicated_blocks += blocks
        self.replicated_bytes += num_bytes
        _replicated.add(blocks)
        _replicated_bytes.add(num_bytes)
