"""Raises a tenant's generation in Redis and waits until every follower has carried it out."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from services.common.generation_follower import FORGET_S
from services.common.generations import MAX_TENANTS
from services.common.keys import KeySpace
from services.common.lua import LuaScript
from services.common.redis_client import REDIS_ERRORS, Backoff, RedisClient

# A Redis that was empty a moment ago may not yet have heard of everybody: a lost connection is tried again within so
# long.
SETTLE_S = 3.0
_POLL_S = 0.03
# A follower says something every second or two; one that has been silent for longer is not waited for.
_SILENT_S = 10

_RAISE = LuaScript("raise_generation")
_STATE = LuaScript("generation_state")


class TableFull(Exception):
    """No further tenant can be cleared; the message says how many have been."""


@dataclass(frozen=True, slots=True)
class Follower:
    """revision: what it has carried out, -1 for nothing yet. silent_s: since it was last heard of."""

    revision: int
    silent_s: int


@dataclass(frozen=True, slots=True)
class Raised:
    """A generation, and the revision of the table that contains it."""

    generation: int
    revision: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A new generation, who has carried it out, and who has not within the time."""

    generation: int
    done: tuple[str, ...]
    missing: dict[str, Follower]


@dataclass(frozen=True, slots=True)
class _State:
    age_s: float
    now: int
    generation: int
    revision: int
    followers: dict[str, Follower]


class GenerationTable:
    """The table, for whoever clears. Methods raise one of REDIS_ERRORS unless they say otherwise."""

    def __init__(self, client: RedisClient, *, keyspace: KeySpace | None = None) -> None:
        self._client = client
        self._keys = (keyspace or KeySpace()).generations()

    async def clear(self, tag: bytes, *, timeout_s: float) -> Outcome:
        """Begin a new generation of a tenant and wait for the followers, at most this long. Raises TableFull.

        timeout_s: more than SETTLE_S.

        Once the generation is in the table, a Redis that does not answer is asked again within the time; then the
        error is raised, and who has carried it out is not known.
        """
        raised = await self._raise(tag)
        ends_s = time.monotonic() + timeout_s
        backoff = Backoff()
        while True:
            try:
                state = await self._state(tag)
                if self._must_raise_again(raised, state):
                    raised = await self._raise(tag)
                    continue
                if state.generation > raised.generation:
                    raised = Raised(state.generation, state.revision)
            except REDIS_ERRORS:
                if time.monotonic() >= ends_s:
                    raise
                await asyncio.sleep(backoff.next_s())
                continue
            missing = {name: one for name, one in state.followers.items() if one.revision < raised.revision}
            is_over = state.age_s >= SETTLE_S and all(one.silent_s > _SILENT_S for one in missing.values())
            if is_over or time.monotonic() >= ends_s:
                return Outcome(raised.generation, tuple(sorted(state.followers.keys() - missing.keys())), missing)
            await asyncio.sleep(_POLL_S)

    @staticmethod
    def _must_raise_again(raised: Raised, state: _State) -> bool:
        """Redis has lost the generation, or somebody has put back one that a clock ahead of this one made."""
        return state.generation < raised.generation or state.generation > max(raised.generation, state.now)

    async def _raise(self, tag: bytes) -> Raised:
        keys = self._keys
        answer = await _RAISE(self._client, [keys.table, keys.revision, keys.changes], [tag, MAX_TENANTS])
        if answer is None:
            raise TableFull(f"{MAX_TENANTS} tenants have been cleared: the table is full")
        return Raised(int(answer[0]), int(answer[1]))

    async def _state(self, tag: bytes) -> _State:
        keys = self._keys
        incarnation, now, generation, revision, flat = await _STATE(
            self._client,
            [keys.incarnation, keys.table, keys.revision, keys.changes, keys.followers],
            [tag, int(FORGET_S)],
        )
        followers = {
            name.decode(): Follower(int(known), int(silent_s))
            for name, known, silent_s in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        }
        return _State((int(now) - int(incarnation)) / 1e6, int(now), int(generation), int(revision), followers)
