"""A bound on bytes per second. Pure."""

from __future__ import annotations


class Pace:
    """What was let through in excess is waited for before the next."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """How long until more may go."""
        return max(0.0, self._free_s - now_s)

    def went(self, num_bytes: int, now_s: float) -> None:
        """So much has gone, or is going."""
        self._free_s = max(self._free_s, now_s) + num_bytes / self._bytes_per_s
