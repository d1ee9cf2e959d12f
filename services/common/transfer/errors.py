"""Errors of a transfer.

TransferError
├── PeerLost           the connection broke, or the peer was silent for too long
├── TransferTimeout    the operation's deadline passed
├── HandshakeRefused   the peer does not know the mesh secret, or speaks another version
├── ProtocolViolation  the peer said something that it may not
└── BlockInvalid       a block's header or payload is not what it must be; `reason` is a metric label
"""

from __future__ import annotations


class TransferError(Exception):
    """A transfer failed; blocks that were reported before the error are good."""


class PeerLost(TransferError):
    """The connection broke, or the peer was silent for too long."""


class TransferTimeout(TransferError):
    """The operation's deadline passed."""


class HandshakeRefused(TransferError):
    """The peer does not know the mesh secret, or speaks another version."""


class ProtocolViolation(TransferError):
    """The peer said something that it may not."""


class BlockInvalid(TransferError):
    """A block must not be used. `reason` is one of a few words, for counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
