"""Totals that the front exports as the worker's metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.mover_messages import MoverCounters


@dataclass(slots=True)
class Counters:
    """Since start; fields and meaning of MoverCounters."""

    pulled_blocks: int = 0
    pulled_bytes: int = 0
    failed_pulls: int = 0
    verification_failures: int = 0
    pushed_blocks: int = 0
    dropped_pushes: int = 0
    served_blocks: int = 0
    bytes_by_transport: dict[str, int] = field(default_factory=dict)

    def pulled_over(self, transport: str, num_bytes: int) -> None:
        """A run of a pull has come over `transport`."""
        self.bytes_by_transport[transport] = self.bytes_by_transport.get(transport, 0) + num_bytes

    def message(self, *, running_pulls: int, queued_pushes: int, open_leases: int) -> MoverCounters:
        """As the front gets them."""
        return MoverCounters(
            self.pulled_blocks,
            self.pulled_bytes,
            self.failed_pulls,
            self.verification_failures,
            self.pushed_blocks,
            self.dropped_pushes,
            self.served_blocks,
            dict(self.bytes_by_transport),
            running_pulls,
            queued_pushes,
            open_leases,
        )
