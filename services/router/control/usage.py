"""What tenants have used, as gateways have told Redis: read for operators, never written here."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta
from typing import Any

from kvmesh.v1 import control_pb2

from services.common.keys import KeySpace
from services.common.redis_client import COMMAND_TIMEOUT_S, REDIS_ERRORS, RedisClient
from services.common.usage import KEEP_DAYS, Usage, UsageKey, usages_of
from services.router.errors import InvalidOperationError, RedisSilentError


class UsageReader:
    """Asks Redis each time."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._keys = KeySpace().usage()

    async def rows(self, request: control_pb2.GetUsageRequest) -> list[control_pb2.UsageRow]:
        """By day, tenant and model. Raises InvalidOperationError or RedisSilentError."""
        found: dict[UsageKey, Usage] = {}
        try:
            for day in _days(request, datetime.now(UTC).date()):
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    fields: dict[Any, Any] = await self._client.hgetall(self._keys.day(day))
                found |= usages_of(day, fields)
        except REDIS_ERRORS as error:
            raise RedisSilentError(f"redis does not answer ({type(error).__name__})") from None
        return [
            _row(key, usage)
            for key, usage in sorted(found.items())
            if request.tenant in ("", key.tenant) and request.model in ("", key.model)
        ]


def _days(request: control_pb2.GetUsageRequest, today: date) -> list[str]:
    try:
        last = date.fromisoformat(request.last_day) if request.last_day else today
        first = date.fromisoformat(request.first_day) if request.first_day else min(last, today)
    except ValueError:
        raise InvalidOperationError("a day is written as 2026-01-31") from None
    count = (last - first).days + 1
    if not 1 <= count <= KEEP_DAYS:
        raise InvalidOperationError(f"1 to {KEEP_DAYS} days can be asked for, not {count}")
    return [(first + timedelta(number)).isoformat() for number in range(count)]


def _row(key: UsageKey, usage: Usage) -> control_pb2.UsageRow:
    return control_pb2.UsageRow(
        day=key.day,
        tenant=key.tenant,
        model=key.model,
        requests=usage.requests,
        prompt_tokens=usage.prompt_tokens,
        cached_local_tokens=usage.cached_local,
        cached_peer_tokens=usage.cached_peer,
        cached_ram_tokens=usage.cached_ram,
        cached_ssd_tokens=usage.cached_ssd,
        output_tokens=usage.output_tokens,
        accelerator_us=usage.accelerator_us,
        cost_nano=usage.cost_nano,
    )
