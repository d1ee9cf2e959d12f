"""What operators can do, on this router's view of the mesh and the table in Redis."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from services.common.redis_client import RedisClient, RedisHealth
from services.router.catalog import CatalogEntry, Models
from services.router.control import entries
from services.router.control.entries import (
    MAX_ADAPTERS,
    AdapterEntry,
    AliasEntry,
    DrainEntry,
    ModelEntry,
    adapter_key,
    alias_key,
    check_adapter,
    drain_key,
    model_key,
)
from services.router.control.follower import ControlFollower
from services.router.control.table import ControlTable
from services.router.decisions import Decisions
from services.router.domain import WorkerId
from services.router.errors import FailedPreconditionError, UnknownError
from services.router.models_feed import ModelsFeed

# They travel to every gateway with the models.
MAX_ALIASES = 1000


@dataclass(frozen=True, slots=True)
class Version:
    """One digest (hex) of a public name; label empty: not registered. served: as its workers tell, None without one."""

    label: str
    digest: str
    weight: int
    replicas: int
    served: CatalogEntry | None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A registered adapter. resident_workers: that have it loaded."""

    name: str
    model: str
    entry: AdapterEntry
    resident_workers: int


@dataclass(frozen=True, slots=True)
class PublicModel:
    """A public name with all its versions."""

    name: str
    entry: ModelEntry
    versions: tuple[Version, ...]


class ControlPlane:
    """Changes apply here when a method returns, and on every other router within a second.

    Methods that change something raise OperatorError.
    """

    def __init__(self, decisions: Decisions, client: RedisClient, health: RedisHealth) -> None:
        self._decisions = decisions
        self.table = ControlTable()
        self.feed = ModelsFeed(decisions.table, self.table)
        self.follower = ControlFollower(client, self.table, epochs=self._epochs, on_change=self._apply, health=health)

    async def register(self, name: str, digest: str, label: str) -> PublicModel:
        """Give a digest a label."""
        digest = digest.lower()
        if not entries.is_digest(digest):
            digest = entries.full_digest(digest, self._reported(name), f"a digest that a worker of {name} has")
        return await self._change(name, lambda entry: entries.register(entry, digest, label))

    async def unregister(self, name: str, version: str) -> PublicModel:
        """Forget a version."""
        return await self._change(name, lambda entry: entries.unregister(entry, version))

    async def set_traffic(self, name: str, weights: Mapping[str, int]) -> PublicModel:
        """Share requests out among versions."""
        return await self._change(name, lambda entry: entries.set_traffic(entry, weights))

    async def rollback(self, name: str) -> PublicModel:
        """All traffic to the version that had it."""
        return await self._change(name, entries.rollback)

    async def set_alias(self, alias: str, model: str) -> None:
        """Let `alias` stand for a model; an empty model ends that. The empty alias is the default model's."""
        if alias:
            entries.check_name(alias)
        if model:
            entries.check_name(model)
            self._check_alias(alias, model)
        payload = msgspec.json.encode(AliasEntry(model))
        await self.follower.change(alias_key(alias), lambda _: payload)

    async def drain(self, worker_id: str) -> None:
        """No new requests for a worker until it starts anew."""
        await self._set_drain(worker_id, self._epoch(worker_id))

    async def undrain(self, worker_id: str) -> None:
        """New requests for it again."""
        self._epoch(worker_id)
        await self._set_drain(worker_id, 0)

    async def add_adapter(self, model: str, name: str, *, digest: str, rank: int, path: str) -> Adapter:
        """Let an adapter be asked for, or another content under its name."""
        entries.check_name(model)
        entry = AdapterEntry(digest.lower(), rank, path, int(time.time()))
        check_adapter(name, entry)
        before = self.table.adapters.get((model, name))
        if before is None and len(self.table.adapters) >= MAX_ADAPTERS:
            raise FailedPreconditionError(f"{MAX_ADAPTERS} adapters are registered: remove one")
        if before is None or (before.digest, before.path) != (entry.digest, entry.path):
            await self._set_adapter(model, name, entry)
        return self._adapter(model, name)

    async def remove_adapter(self, model: str, name: str) -> Adapter:
        """No new requests for it."""
        removed = self._adapter(model, name)
        await self._set_adapter(model, name, AdapterEntry())
        return removed

    def adapters(self) -> list[Adapter]:
        """All that are registered."""
        return [self._adapter(model, name) for model, name in sorted(self.table.adapters)]

    def models(self) -> list[PublicModel]:
        """Every name that a worker has or that somebody has registered."""
        self.feed.refresh(time.monotonic())
        models = self.feed.models
        names = {entry.identity.model for entry in models.entries} | {name for name, _ in models.registered}
        return [self._public(name, models) for name in sorted(names)]

    def model(self, name: str) -> PublicModel:
        """One name."""
        self.feed.refresh(time.monotonic())
        return self._public(name, self.feed.models)

    async def _change(self, name: str, edit: Callable[[ModelEntry], ModelEntry]) -> PublicModel:
        entries.check_name(name)

        def edited(payload: bytes | None) -> bytes:
            before = ModelEntry() if payload is None else msgspec.json.decode(payload, type=ModelEntry)
            return msgspec.json.encode(edit(before), order="deterministic")

        await self.follower.change(model_key(name), edited)
        return self.model(name)

    def _check_alias(self, alias: str, model: str) -> None:
        aliases = self.table.aliases
        if alias and any(alias == one.name for one in self.models()):
            raise FailedPreconditionError(f"a model is called {alias!r}: requests for it would go elsewhere")
        if model in aliases or model == alias:
            raise FailedPreconditionError(f"{model!r} is an alias itself: name the model that it stands for")
        if alias in aliases.values():
            raise FailedPreconditionError(f"{alias!r} has an alias: no alias stands for another one")
        if alias not in aliases and len(aliases) >= MAX_ALIASES:
            raise FailedPreconditionError(f"{MAX_ALIASES} aliases are set: remove one")

    async def _set_drain(self, worker_id: str, epoch: int) -> None:
        payload = msgspec.json.encode(DrainEntry(epoch))
        await self.follower.change(drain_key(worker_id), lambda _: payload)

    async def _set_adapter(self, model: str, name: str, entry: AdapterEntry) -> None:
        payload = msgspec.json.encode(entry, order="deterministic")
        await self.follower.change(adapter_key(model, name), lambda _: payload)

    def _adapter(self, model: str, name: str) -> Adapter:
        entry = self.table.adapters.get((model, name))
        if entry is None:
            raise UnknownError(f"the model {model[:100]!r} has no adapter {name[:100]!r}")
        digest = bytes.fromhex(entry.digest)
        workers = self._decisions.table.workers.values()
        return Adapter(name, model, entry, sum(digest in worker.adapters.resident for worker in workers))

    def _public(self, name: str, models: Models) -> PublicModel:
        entry = self.table.model(name)
        served = {one.identity.model_digest.hex(): one for one in models.entries if one.identity.model == name}
        replicas = Counter(self._digests(name))
        digests = [*entry.versions.values(), *sorted(served.keys() - set(entry.versions.values()))]
        return PublicModel(
            name,
            entry,
            tuple(
                Version(
                    entry.label_of(digest), digest, entry.weights.get(digest, 0), replicas[digest], served.get(digest)
                )
                for digest in digests
            ),
        )

    def _digests(self, name: str) -> list[str]:
        """The digest of each worker of a public name."""
        identities = (worker.identity for worker in self._decisions.table.workers.values())
        return [one.model_digest.hex() for one in identities if one is not None and one.model == name]

    def _reported(self, name: str) -> set[str]:
        return {*self._digests(name), *self.table.model(name).versions.values()}

    def _epoch(self, worker_id: str) -> int:
        worker = self._decisions.table.workers.get(WorkerId(worker_id))
        if worker is None:
            raise UnknownError(f"no worker is called {worker_id[:100]!r}")
        return worker.record.epoch

    def _epochs(self) -> dict[str, int]:
        return {worker_id: worker.record.epoch for worker_id, worker in self._decisions.table.workers.items()}

    def _apply(self) -> None:
        self._decisions.table.set_drains(self.table.drains)
        self.feed.refresh(time.monotonic())
