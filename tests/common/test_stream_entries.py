"""Entries of streams, as a real server gives them."""

from __future__ import annotations

from services.common.redis_client import connect_redis
from services.common.stream_entries import entries_of, format_position, parse_position
from tests.support.valkey import Valkey


async def test_entries_come_in_order_after_the_position_that_was_read_last(valkey: Valkey) -> None:
    client = connect_redis(valkey.url)
    try:
        assert entries_of(await client.xread({"stream": "0-0"})) == []
        written = [await client.xadd("stream", {"number": number}) for number in range(3)]
        found = entries_of(await client.xread({"stream": "0-0"}))
        assert [position for position, _ in found] == written
        assert [fields for _, fields in found] == [{b"number": b"%d" % number} for number in range(3)]
        places = [parse_position(position) for position in written]
        assert places == sorted(places)
        assert entries_of(await client.xread({"stream": format_position(places[1])})) == found[2:]
    finally:
        await client.aclose()
