"""Keeps a ledger in a file, so that what was counted outlives the gateway, and a Redis that keeps nothing."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from services.common.durable_file import replace_file
from services.common.settings import ConfigurationError
from services.gateway.usage.ledger import LedgerState


def load_ledger(path: Path | None) -> LedgerState:
    """What the file holds; a new ledger where there is none. Raises ConfigurationError for what is none."""
    new = LedgerState(secrets.token_hex(16))
    if path is None:
        return new
    try:
        return msgspec.json.decode(path.read_bytes(), type=LedgerState)
    except FileNotFoundError:
        return new
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"gateway: usage_file={path}: {error}") from None


def save_ledger(path: Path, state: LedgerState) -> None:
    """Replace the file, for good: one that came back after a loss of power would number other batches like those that
    Redis has had since, and these would be lost. Raises OSError; then the old one may still be there.
    """
    replace_file(path, msgspec.json.encode(state))
