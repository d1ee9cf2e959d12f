"""The registry against a real Valkey."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.common import registry
from services.common.keys import KeySpace
from services.common.redis_client import RedisClient, connect_redis
from services.common.registry import LocationRecord, Registrar, RegistryChange, RegistryWatcher, new_epoch
from tests.support.valkey import Valkey
from tests.support.waiting import eventually, eventually_async


def record(name: str = "w1", **changes: object) -> LocationRecord:
    base = LocationRecord(kind="worker", id=name, epoch=new_epoch(), host="h", grpc_address="127.0.0.1:1")
    return msgspec.structs.replace(base, **changes)


async def test_a_new_a_changed_and_a_withdrawn_location_are_seen_without_a_snapshot(
    client: RedisClient, tasks: asyncio.TaskGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_SNAPSHOT_EVERY_S", 600.0)
    watcher = RegistryWatcher(client)
    tasks.create_task(watcher.run())
    await asyncio.wait_for(watcher.synced.wait(), 30)
    first = record()
    registrar = Registrar(client, first)
    running = tasks.create_task(registrar.run())
    await eventually(lambda: watcher.records.get("worker/w1") == first)
    changed = msgspec.structs.replace(first, model="m")
    registrar.update(changed)
    await eventually(lambda: watcher.records.get("worker/w1") == changed)
    running.cancel()
    await registrar.close()
    await eventually(lambda: not watcher.records)


async def test_subscribers_learn_of_known_records_and_of_changes(client: RedisClient, tasks: asyncio.TaskGroup) -> None:
    watcher = RegistryWatcher(client)
    tasks.create_task(watcher.run())
    registrar = Registrar(client, record())
    running = tasks.create_task(registrar.run())
    await eventually(lambda: watcher.records)
    changes: list[RegistryChange] = []
    watcher.subscribe(changes.append)
    assert [change.gone for change in changes] == [False]
    running.cancel()
    await registrar.close()
    await eventually(lambda: len(changes) == 2)
    assert changes[1].gone


async def test_records_of_a_later_release_are_read_or_passed_over(
    client: RedisClient, tasks: asyncio.TaskGroup
) -> None:
    """One has another field, one is of a kind that is not known, one is no record at all."""
    keys, known = KeySpace().registry(), record("w1")
    grown = msgspec.msgpack.encode(msgspec.to_builtins(known) | {"later": [1]})
    other = msgspec.msgpack.encode(msgspec.to_builtins(known) | {"kind": "pool", "id": "p"})
    for location, packed in (("worker/w1", grown), ("pool/p", other), ("pool/q", b"\xc1")):
        await client.sadd(keys.members, location)
        await client.hset(keys.record(location), "record", packed)
    watcher = RegistryWatcher(client)
    tasks.create_task(watcher.run())
    await eventually(lambda: watcher.records, timeout_s=20)
    assert watcher.records == {"worker/w1": known}
    assert await registry.read_registry(client) == [known]


async def test_a_lease_that_is_not_renewed_ends(
    client: RedisClient, tasks: asyncio.TaskGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "LEASE_S", 0.3)
    monkeypatch.setattr(registry, "_SNAPSHOT_EVERY_S", 0.2)
    monkeypatch.setattr(registry, "BLOCK_MS", 100)
    watcher = RegistryWatcher(client)
    tasks.create_task(watcher.run())
    running = tasks.create_task(Registrar(client, record()).run())
    await eventually(lambda: watcher.records)
    running.cancel()
    await eventually(lambda: not watcher.records)


async def test_an_old_epoch_does_not_replace_a_later_one(client: RedisClient, tasks: asyncio.TaskGroup) -> None:
    watcher = RegistryWatcher(client)
    tasks.create_task(watcher.run())
    later = record(epoch=20)
    registrar = Registrar(client, later)
    tasks.create_task(registrar.run())
    await asyncio.wait_for(registrar.registered.wait(), 30)
    old = Registrar(client, record(epoch=10))
    tasks.create_task(old.run())
    await eventually(lambda: old._rejected)
    await old.close()
    await eventually(lambda: watcher.records.get("worker/w1") == later)


@pytest.mark.parametrize("flush", [False, True], ids=["restart", "flushall"])
async def test_redis_coming_back_empty_drops_nobody_and_holders_register_again(
    valkey: Valkey, client: RedisClient, tasks: asyncio.TaskGroup, flush: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RENEW_S", 0.5)
    watcher = RegistryWatcher(client)
    changes: list[RegistryChange] = []
    watcher.subscribe(changes.append)
    tasks.create_task(watcher.run())
    tasks.create_task(Registrar(client, record()).run())
    await eventually(lambda: watcher.records)
    if flush:
        await client.flushall()
    else:
        valkey.restart(empty=True)
    probe = connect_redis(valkey.url)
    members = watcher._keys.members
    await eventually_async(lambda: probe.scard(members))
    await probe.aclose()
    assert watcher.records
    assert not any(change.gone for change in changes)


async def test_what_does_not_come_back_is_dropped_after_the_freeze(
    valkey: Valkey, client: RedisClient, tasks: asyncio.TaskGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FREEZE_S", 0.5)
    monkeypatch.setattr(registry, "_SNAPSHOT_EVERY_S", 0.1)
    monkeypatch.setattr(registry, "BLOCK_MS", 100)
    watcher = RegistryWatcher(client)
    tasks.create_task(watcher.run())
    running = tasks.create_task(Registrar(client, record()).run())
    await eventually(lambda: watcher.records)
    running.cancel()
    valkey.restart(empty=True)
    await eventually(lambda: not watcher.records)
