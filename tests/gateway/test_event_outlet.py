"""The writes of one stream, to a call that takes them or has ended."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import grpc.aio
import pytest
from google.api.httpbody_pb2 import HttpBody

from services.gateway.api.edge import Context
from services.gateway.api.event_outlet import EventOutlet
from services.gateway.api.openai_render import COMMENT
from services.gateway.pulse import Pulse
from tests.support.waiting import eventually


class Call:
    """The only method of a gRPC context that an outlet uses."""

    def __init__(self) -> None:
        self.has_ended = False
        self.tries = 0
        self.written: list[bytes] = []

    async def write(self, message: HttpBody) -> None:
        self.tries += 1
        await asyncio.sleep(0)
        if self.has_ended:
            raise grpc.aio.InternalError
        self.written.append(message.data)


async def test_a_beat_to_a_client_that_has_left_harms_nobody() -> None:
    """Nobody waits for a beat, so an error of it would be found by the garbage collector alone."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    call = Call()
    outlet = EventOutlet(cast(Context, call), Pulse(1.0, 1.0), heartbeat_s=0.0)
    for has_ended in (False, True):
        call.has_ended = has_ended
        outlet.pulse(asyncio.get_running_loop().time())
        await eventually(lambda: len(asyncio.all_tasks()) == 1)
    assert (call.tries, call.written) == (2, [COMMENT])
    gc.collect()
    assert unhandled == []
    with pytest.raises(grpc.aio.InternalError):
        await outlet.flush(b"more")
    assert call.written == [COMMENT]
