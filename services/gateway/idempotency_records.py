"""Who runs or has run a request with an idempotency key, in Redis, so that all gateways know.

One hash for each tenant and key, under a name that says neither: the digest of the body, the number of the run, and
where a worker has each of its prompts. No call waits long for Redis, and none at all for a while after it was lost:
requests then run as if they had no key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from opentelemetry import metrics

from services.common.keys import KeySpace
from services.common.lua import LuaScript
from services.common.redis_client import REDIS_ERRORS, RedisClient

# A run whose gateway has said nothing for so long, and that no worker has taken, may be run anew.
LEASE_S = 3.0
_ANSWER_S = 0.25
_PAUSE_S = 1.0
_failures = metrics.get_meter("kvmesh.gateway").create_counter(
    "kvmesh_gateway_keyed_record_failures",
    description="Records of idempotency keys not read or written, as Redis did not answer or another run had them.",
)
_CLAIM, _NOTE = LuaScript("claim_request"), LuaScript("note_request")
_log = structlog.get_logger("gateway.idempotency")


class RecordsLost(Exception):
    """Redis does not answer."""


class OtherBody(Exception):
    """The key belongs to another request."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker has one prompt. attempt: of the run. is_resumed: it has begun with output of an earlier one."""

    address: str
    worker_id: str
    attempt: int
    is_resumed: bool

    def packed(self) -> str:
        """As text."""
        return f"{self.address} {self.attempt} {int(self.is_resumed)} {self.worker_id}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Inverse of `packed`."""
        address, attempt, is_resumed, worker_id = text.split(" ", 3)
        return cls(address, worker_id, int(attempt), is_resumed == "1")


@dataclass(frozen=True, slots=True)
class Claim:
    """is_ours: the caller is to run the request. Otherwise where it runs; places: by prompt, empty until all are known.

    at_s: Unix time of the first claim. model, model_digest: of the run, empty until it has begun. revision: raised
    whenever a prompt gets another place.
    """

    run: str
    at_s: int
    is_ours: bool
    model: str = ""
    model_digest: bytes = b""
    places: tuple[Place, ...] = ()
    revision: str = ""


class IdempotencyRecords:
    """The records of all keys. Methods raise RecordsLost."""

    def __init__(self, client: RedisClient, window_s: float) -> None:
        """window_s: for which a record stays after the answer's end."""
        self._client = client
        self._window_s = window_s
        self._lost_until_s = float("-inf")
        self._is_lost = False

    async def claim(self, tag: str, digest: str, *, life_s: float, failed: Claim | None = None) -> Claim:
        """Make the request the caller's to run, or learn where it runs. Raises OtherBody.

        life_s: most that the request may still take. failed: what the caller has learned before, and could not attach
        to.
        """
        known = ("", "") if failed is None else (failed.run, failed.revision)
        answer = await self._call(_CLAIM, tag, [digest, *known, _ms(LEASE_S), _ms(life_s + self._window_s)])
        kind = answer[0].decode()
        if kind == "other":
            raise OtherBody
        run, at_s = answer[1].decode(), int(answer[2])
        if kind == "run":
            return Claim(run, at_s, is_ours=True)
        values = iter(value.decode() for value in answer[3])
        return _held(run, at_s, dict(zip(values, values, strict=True)))

    async def note(self, tag: str, run: str, fields: Mapping[str, str], *, life_s: float) -> bool:
        """Write what has become of a run, and renew its lease; False when it is no longer the record's.

        life_s: as in `claim`; 0 when the answer is complete.
        """
        pairs = [text for pair in fields.items() for text in pair]
        is_ours = bool(await self._call(_NOTE, tag, [run, _ms(LEASE_S), _ms(life_s + self._window_s), *pairs]))
        if not is_ours:
            _failures.add(1, {"reason": "superseded"})
        return is_ours

    async def forget(self, tag: str, run: str) -> None:
        """There is nothing to repeat: the run has failed."""
        await self._call(_NOTE, tag, [run, 0, 0])

    async def _call(self, script: LuaScript, tag: str, arguments: list[str | bytes | int]) -> Any:
        if time.monotonic() < self._lost_until_s:
            raise RecordsLost
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await script(self._client, (KeySpace().request(tag),), arguments)
        except REDIS_ERRORS as error:
            _failures.add(1, {"reason": "lost"})
            self._lost_until_s = time.monotonic() + _PAUSE_S
            if not self._is_lost:
                self._is_lost = True
                _log.warning("idempotency_lost", detail="requests run without their keys", error=type(error).__name__)
            raise RecordsLost from None
        if self._is_lost:
            self._is_lost = False
            _log.info("idempotency_back", detail="redis answers again")
        return answer


def begun_fields(model: str, model_digest: bytes, num_prompts: int) -> dict[str, str]:
    """What a run's record says of its plan."""
    return {"model": model, "digest": model_digest.hex(), "prompts": str(num_prompts)}


def place_fields(places: Mapping[int, Place], num_prompts: int, revision: int) -> dict[str, str]:
    """What it says of the prompts that workers have, by number."""
    fields = {f"place{index}": place.packed() for index, place in places.items()}
    fields["revision"] = str(revision)
    if len(places) == num_prompts:
        fields["taken"] = "1"
    return fields


def _held(run: str, at_s: int, fields: dict[str, str]) -> Claim:
    places: tuple[Place, ...] = ()
    if "taken" in fields:
        places = tuple(Place.parse(fields[f"place{index}"]) for index in range(int(fields["prompts"])))
    return Claim(
        run,
        at_s,
        is_ours=False,
        model=fields.get("model", ""),
        model_digest=bytes.fromhex(fields.get("digest", "")),
        places=places,
        revision=fields.get("revision", ""),
    )


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
