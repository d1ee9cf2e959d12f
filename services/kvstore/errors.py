"""Errors of a kvstore node.

KvStoreError
├── StartFailed    an address is taken, or the memory is not to be had
└── PartRefused    some heads of a block are not taken; `reason` is a metric label
"""

from __future__ import annotations


class KvStoreError(Exception):
    """Base of all; one line."""


class StartFailed(KvStoreError):
    """An address is taken, or the memory is not to be had."""


class PartRefused(KvStoreError):
    """Some heads of a block are not taken. `reason` is one of a few phrases, for counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
