"""What this router knows of what operators have set: entries with versions, and what follows from them. Pure.

The newer version of an entry wins, wherever it comes from. Drains belong to one start of a worker: its next start
takes requests again.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import structlog

from services.router.control.entries import (
    AdapterEntry,
    AliasEntry,
    DrainEntry,
    ModelEntry,
    adapter_of,
    alias_of,
    name_of,
    worker_of,
)

# What is undone, or of a worker that is gone, is kept for so long: whoever missed the change must not bring it back.
KEEP_US = 24 * 3600 * 1_000_000
_log = structlog.get_logger()


class Entry(msgspec.Struct, frozen=True):
    """version: microseconds of Redis's clock at the change, or more. payload: JSON."""

    version: int
    payload: bytes

    @classmethod
    def parse(cls, stored: bytes) -> Entry:
        """From its form in Redis."""
        version, _, payload = stored.partition(b" ")
        return cls(int(version), payload)

    def stored(self) -> bytes:
        """Its form in Redis."""
        return b"%d %s" % (self.version, self.payload)


class ControlTable:
    """Owner of the entries; `models`, `aliases`, `drains` and `adapters` follow from them."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.models: dict[str, ModelEntry] = {}
        # Models by their other names; by the empty one the default model.
        self.aliases: dict[str, str] = {}
        # Epochs of drained workers, by worker.
        self.drains: dict[str, int] = {}
        # Registered adapters, by base model and name.
        self.adapters: dict[tuple[str, str], AdapterEntry] = {}

    def model(self, name: str) -> ModelEntry:
        """Versions of a public name."""
        return self.models.get(name, ModelEntry())

    def beyond(self, found: Mapping[str, Entry], epochs: Mapping[str, int], now_us: int) -> dict[str, Entry]:
        """Entries that `found` lacks or has older, but for those that are over."""
        return {
            key: entry
            for key, entry in self.entries.items()
            if (key not in found or found[key].version < entry.version) and not self.is_over(key, epochs, now_us)
        }

    def replace(self, found: Mapping[str, Entry]) -> bool:
        """Take over what Redis has; whether anything is different now."""
        if self.entries == found:
            return False
        self.entries = dict(found)
        self.models, self.aliases, self.drains, self.adapters = {}, {}, {}, {}
        for key, entry in found.items():
            self._enter(key, entry)
        return True

    def _enter(self, key: str, entry: Entry) -> None:
        """What cannot be read, such as an entry of a later release, is kept and does not apply."""
        name, worker_id, adapter, alias = name_of(key), worker_of(key), adapter_of(key), alias_of(key)
        try:
            if name is not None:
                self.models[name] = msgspec.json.decode(entry.payload, type=ModelEntry)
            elif worker_id is not None:
                epoch = msgspec.json.decode(entry.payload, type=DrainEntry).epoch
                self.drains.update({worker_id: epoch} if epoch else {})
            elif adapter is not None:
                registered = msgspec.json.decode(entry.payload, type=AdapterEntry)
                self.adapters.update({adapter: registered} if registered.digest else {})
            elif alias is not None:
                model = msgspec.json.decode(entry.payload, type=AliasEntry).model
                self.aliases.update({alias: model} if model else {})
        except msgspec.MsgspecError as error:
            _log.error("an entry of operators cannot be read", key=key, error=str(error))

    def over(self, epochs: Mapping[str, int], now_us: int) -> dict[str, int]:
        """Versions of the entries that nobody needs any more, by key. epochs: of the workers that are there."""
        return {key: entry.version for key, entry in self.entries.items() if self.is_over(key, epochs, now_us)}

    def is_over(self, key: str, epochs: Mapping[str, int], now_us: int) -> bool:
        """Whether an entry says nothing any more, and has for long."""
        if now_us - self.entries[key].version < KEEP_US:
            return False
        worker_id, name, adapter, alias = worker_of(key), name_of(key), adapter_of(key), alias_of(key)
        if adapter is not None:
            return adapter not in self.adapters
        if alias is not None:
            return alias not in self.aliases
        if worker_id is not None:
            epoch = self.drains.get(worker_id)
            return epoch is None or epochs.get(worker_id) != epoch
        return name is not None and not self.model(name).versions
