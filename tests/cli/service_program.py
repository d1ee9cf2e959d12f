"""A small real service for the supervisor's tests: gRPC health, `/readyz`, a ready file, and faults on demand."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from google.api.httpbody_pb2 import HttpBody
from kvmesh.v1 import openai_pb2_grpc

from services.common.process import stop_event, write_ready_file
from services.common.rpc import MeshServer


class OpenAIServer(openai_pb2_grpc.OpenAIServicer):
    async def Readyz(self, request: Any, context: Any) -> HttpBody:
        return HttpBody(content_type="application/json", data=b"{}")


async def serve(listen: str, ready_file: Path, is_stubborn: bool) -> None:
    stop = stop_event()
    for number in (signal.SIGTERM, signal.SIGINT) if is_stubborn else ():
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    server = MeshServer(listen, secret=None)
    server.add(openai_pb2_grpc.add_OpenAIServicer_to_server, OpenAIServer(), "kvmesh.v1.OpenAI")
    address = await server.start()
    helper = await asyncio.create_subprocess_exec("sleep", "1000")
    children = [{"role": "helper", "pid": helper.pid}, {"role": "gone", "pid": 2**22}]
    write_ready_file(ready_file, address=address, metrics="", children=children)
    await server.set_ready(True)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen")
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--fault", default="")
    arguments = parser.parse_args()
    if arguments.fault == "configuration":
        sys.stderr.write("some noise\nkvmesh: router: threads='x': not a number\n")
        sys.exit(2)
    if arguments.fault == "crash":
        sys.exit("out of luck")
    asyncio.run(serve(arguments.listen, arguments.ready_file, arguments.fault == "stubborn"))
