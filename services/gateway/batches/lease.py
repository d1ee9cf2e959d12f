"""Who runs a batch, in Redis: a lease that its gateway renews and that lapses with it.

The lease spares work, no more: what keeps a batch's results right is on disk (`result_log`). So a gateway that runs a
batch goes on while Redis does not answer, and takes up none then.
"""

from __future__ import annotations

import asyncio

from services.common.keys import KeySpace
from services.common.lua import LuaScript
from services.common.redis_client import REDIS_ERRORS, RedisClient

LEASE_S = 10.0
RENEW_S = 2.5
_ANSWER_S = 1.0
_SCRIPT = LuaScript("lease")


class BatchLease:
    """One gateway's leases. holder: its name, of this life alone."""

    def __init__(self, client: RedisClient, holder: str) -> None:
        self._client = client
        self._holder = holder

    async def hold(self, batch_id: str) -> bool | None:
        """Take or renew it; False: another has it, None: Redis does not answer."""
        return await self._call(batch_id, LEASE_S)

    async def give_back(self, batch_id: str) -> None:
        """Let others have it at once, where Redis answers."""
        await self._call(batch_id, 0.0)

    async def _call(self, batch_id: str, lease_s: float) -> bool | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                key = KeySpace().batch(batch_id)
                return bool(await _SCRIPT(self._client, (key,), (self._holder, int(lease_s * 1000))))
        except REDIS_ERRORS:
            return None
