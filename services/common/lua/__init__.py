"""Lua scripts that Redis runs atomically, one file each, called by the hash of their text.

A script names its keys and arguments at its top. Changing the text changes the hash, so processes of different
versions never run each other's script.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError

from services.common.redis_client import COMMAND_TIMEOUT_S, RedisClient


class LuaScript:
    """A script from this folder."""

    def __init__(self, name: str) -> None:
        self._text = (Path(__file__).parent / f"{name}.lua").read_text()
        self._sha = sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: RedisClient, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any:
        """Run it; sends the text only where the server does not know it. Raises one of REDIS_ERRORS."""
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            try:
                return await client.evalsha(self._sha, len(keys), *keys, *args)
            except NoScriptError:
                return await client.eval(self._text, len(keys), *keys, *args)
