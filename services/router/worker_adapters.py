"""Which adapters a worker has or will soon have loaded, as a router knows it. Pure; time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.domain import Load

# What was granted is expected to be loaded, and counted as such, until reports must have shown it.
_EXPECTED_S = 2.0
_MAX_EXPECTED = 256


@dataclass(slots=True)
class WorkerAdapters:
    """As last reported, and what this router has granted since."""

    resident: frozenset[bytes] = frozenset()
    _idle_slots: int = 0
    _load_s: float = 0.0
    # When requests with an adapter that was not there were granted, the latest of each last.
    _expected: dict[bytes, float] = field(default_factory=dict)

    def told(self, load: Load) -> None:
        """A report has come."""
        self.resident = load.adapters
        self._idle_slots, self._load_s = load.idle_adapter_slots, load.adapter_load_s

    def granted(self, digest: bytes, now_s: float) -> None:
        """The worker is about to get a request with this adapter."""
        self._expected.pop(digest, None)
        self._expected[digest] = now_s
        while len(self._expected) > _MAX_EXPECTED or now_s - next(iter(self._expected.values())) > _EXPECTED_S:
            del self._expected[next(iter(self._expected))]

    def load_s(self, digest: bytes, now_s: float) -> float:
        """Seconds until the worker can have the adapter; 0 where it has it, or will by then."""
        return 0.0 if self._has(digest, now_s) else self._load_s

    def is_full(self, digest: bytes, now_s: float) -> bool:
        """Whether the adapter is not there and has no place to go to at present."""
        return self._idle_slots == 0 and not self._has(digest, now_s)

    def _has(self, digest: bytes, now_s: float) -> bool:
        return digest in self.resident or now_s - self._expected.get(digest, -_EXPECTED_S) < _EXPECTED_S
