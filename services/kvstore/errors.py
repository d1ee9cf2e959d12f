"""Errors of a kvstore node.

KvStoreError
└── StartFailed    an address is taken, or the memory is not to be had
"""

from __future__ import annotations


class KvStoreError(Exception):
    """Something that ends the node; one line."""


class StartFailed(KvStoreError):
    """An address is taken, or the memory is not to be had."""
