"""Quotas of tenants, kept in Redis so that all gateways agree: requests and tokens per minute, requests in flight.

A request is charged before it is dispatched, in one round trip, and settled after it has ended with what it used. A
place in flight is a lease that this gateway renews, so that those of a gateway that dies come back. While Redis does
not answer, each gateway enforces its share of what was left; tokens used meanwhile, and requests in flight, are counted
in Redis when it answers again. Tenants without quotas cost nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import structlog
from opentelemetry import metrics

from services.common.blocks import tenant_tag
from services.common.keys import KeySpace
from services.common.lua import LuaScript
from services.common.redis_client import REDIS_ERRORS, RedisClient
from services.gateway.errors import TenantLimitExceeded
from services.gateway.quota_share import QuotaLeft, QuotaShare, UsedUp
from services.gateway.tenants import TenantPolicy

LEASE_S = 15.0
_RENEWALS_PER_LEASE = 3
# What has ended and Redis is not told runs out with its lease.
_MAX_ENDED = 4096
# A request waits no longer than this for Redis; for the pause after it none waits at all.
_ANSWER_S = 0.25
_PAUSE_S = 1.0
_QUOTAS = {
    "requests": "{} requests per minute",
    "tokens": "{} tokens per minute",
    "concurrent": "{} requests at a time",
}
_SCRIPT = LuaScript("quota")
_log = structlog.get_logger("gateway.quotas")
_meter = metrics.get_meter("kvmesh.gateway")
_refused = _meter.create_counter(
    "kvmesh_gateway_quota_refusals", description="Requests refused because a quota was used up, by tenant and quota."
)
_alone = _meter.create_counter(
    "kvmesh_gateway_quota_local", description="Requests judged by this gateway's share, without Redis."
)


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request was charged: tokens, and a place in flight. is_local: Redis does not know of it."""

    tenant: str
    tokens: float
    lease: str
    is_local: bool


@dataclass(slots=True)
class _Usage:
    """One tenant's requests at this gateway.

    num_judged: being charged now. ended, given_back: not yet told to Redis.
    """

    policy: TenantPolicy
    num_judged: int = 0
    open: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    given_back: float = 0.0
    left: QuotaLeft | None = None
    share: QuotaShare | None = None


class Quotas:
    """Owner of the charges of this gateway. `run` until cancelled; every Charge is given to `settle` once."""

    def __init__(self, client: RedisClient, instance: str, block_key: bytes) -> None:
        self._client = client
        self._instance = instance
        self._block_key = block_key
        self._usages: dict[str, _Usage] = {}
        self._num_leases = 0
        self._is_alone = False
        self._alone_until_s = float("-inf")
        self._changed = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Charges not settled; 0 when idle."""
        return sum(len(usage.open) + usage.num_judged for usage in self._usages.values())

    async def charge(self, tenant: str, policy: TenantPolicy, tokens: float) -> Charge | None:
        """Charge one request; None for a tenant without quotas. Raises TenantLimitExceeded."""
        if not policy.has_quota:
            return None
        usage = self._usages.setdefault(tenant, _Usage(policy))
        usage.policy = policy
        self._num_leases += 1
        lease = f"{self._instance}:{self._num_leases}"
        usage.num_judged += 1
        try:
            used_up, is_local = await self._judge(tenant, usage, tokens, lease)
        except BaseException:
            # Redis may have taken the lease already.
            self._end(usage, lease)
            raise
        finally:
            usage.num_judged -= 1
        if used_up is None:
            usage.open.add(lease)
            return Charge(tenant, tokens, lease, is_local)
        if is_local:
            self._end(usage, lease)
        _refused.add(1, {"tenant": tenant, "quota": used_up.quota})
        raise TenantLimitExceeded(_message(used_up, policy), None, used_up.wait_s)

    def settle(self, charge: Charge, used_tokens: float) -> None:
        """The request has ended and has used so many tokens; 0 when no worker had taken it."""
        usage = self._usages[charge.tenant]
        if usage.share is not None:
            usage.share.give_back(charge.tokens - used_tokens, time.monotonic())
        usage.given_back += (0.0 if charge.is_local else charge.tokens) - used_tokens
        self._end(usage, charge.lease)

    async def run(self) -> None:
        """Tell Redis what has ended, and renew what runs, until cancelled."""
        while True:
            self._changed.clear()
            for tenant, usage in list(self._usages.items()):
                if usage.open or usage.ended:
                    await self._tell(tenant, usage)
            await self._pause()

    async def _pause(self) -> None:
        """Until something changes or leases have to be renewed; at once again only while Redis answers."""
        if time.monotonic() < self._alone_until_s:
            await asyncio.sleep(_PAUSE_S)
            return
        try:
            async with asyncio.timeout(LEASE_S / _RENEWALS_PER_LEASE if self._usages else None):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _judge(self, tenant: str, usage: _Usage, tokens: float, lease: str) -> tuple[UsedUp | None, bool]:
        """Which quota is used up, and whether this gateway alone says so."""
        if time.monotonic() >= self._alone_until_s:
            try:
                quota, wait_ms = await self._call(tenant, usage, lease, tokens)
            except REDIS_ERRORS as error:
                self._lost(error)
            else:
                return (UsedUp(quota, wait_ms / 1000) if quota else None), False
        _alone.add(1, {"tenant": tenant})
        if usage.share is None or usage.share.policy != usage.policy:
            usage.share = QuotaShare(usage.policy, usage.left)
        return usage.share.take(tokens, len(usage.open) + usage.num_judged - 1, time.monotonic()), True

    async def _tell(self, tenant: str, usage: _Usage) -> None:
        try:
            await self._call(tenant, usage)
        except REDIS_ERRORS as error:
            self._lost(error)

    async def _call(self, tenant: str, usage: _Usage, lease: str = "", tokens: float = 0.0) -> tuple[str, float]:
        """One round trip. What has ended is told again after a failure, which gives some tokens back twice at worst."""
        ended, given_back = usage.ended, usage.given_back
        usage.ended, usage.given_back = [], 0.0
        keys = KeySpace().quota(tenant_tag(self._block_key, tenant))
        policy = usage.policy
        arguments: list[str | bytes | int] = [
            policy.requests_per_minute or 0,
            policy.tokens_per_minute or 0,
            policy.concurrent_requests or 0,
            int(LEASE_S * 1000),
            str(given_back),
            self._instance,
            str(tokens),
            lease,
            len(ended),
            *ended,
            *usage.open,
        ]
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer: list[Any] = await _SCRIPT(self._client, (keys.buckets, keys.leases, keys.gateways), arguments)
        except BaseException:
            usage.ended = (ended + usage.ended)[-_MAX_ENDED:]
            usage.given_back += given_back
            raise
        if self._is_alone:
            self._is_alone = False
            _log.info("quotas_shared", detail="redis answers again")
        usage.share = None
        usage.left = QuotaLeft(float(answer[2]), float(answer[3]), int(answer[4]))
        return answer[0].decode(), float(answer[1])

    def _lost(self, error: BaseException) -> None:
        self._alone_until_s = time.monotonic() + _PAUSE_S
        if not self._is_alone:
            self._is_alone = True
            _log.warning("quotas_local", detail="each gateway enforces its share", error=type(error).__name__)

    def _end(self, usage: _Usage, lease: str) -> None:
        usage.open.discard(lease)
        usage.ended.append(lease)
        del usage.ended[:-_MAX_ENDED]
        self._changed.set()


def _message(used_up: UsedUp, policy: TenantPolicy) -> str:
    quota = {
        "requests": policy.requests_per_minute,
        "tokens": policy.tokens_per_minute,
        "concurrent": policy.concurrent_requests,
    }[used_up.quota]
    return f"this tenant's quota of {_QUOTAS[used_up.quota].format(quota)} is used up"
