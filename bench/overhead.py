"""What gateway and Envoy add to the time to first token, on a running local mesh: `python -m bench.overhead`.

Requests go in turn through the mesh and straight to a worker, one at a time, so that whatever else the machine does
meets both alike. Prompts are short and fresh: the model's own time is small beside what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.load import Send, Workload, prompts
from bench.load_direct import direct_load
from bench.load_http import http_load
from services.cli.errors import NotRunningError
from services.cli.state import StateDir, state_path
from services.cli.supervisor import reachable
from services.common.models import DEFAULT_MODEL
from services.common.security import MeshSecret

_WORKLOAD = Workload("overhead", 0, 32, 2)
_WARM_UP = 5


async def paired_ttfts(through: Send, direct: Send, count: int) -> list[tuple[float, float]]:
    """(through the mesh, direct) in ms; which of the two goes first alternates."""
    source = prompts(_WORKLOAD, random.Random(secrets.randbits(32)))
    pairs: list[tuple[float, float]] = []
    for number in range(_WARM_UP + count):
        order = [(0, through), (1, direct)]
        taken = [0.0, 0.0]
        for index, send in order if number % 2 else reversed(order):
            taken[index] = (await send(next(source), _WORKLOAD.output_tokens)).ttft_s * 1e3
        pairs.append((taken[0], taken[1]))
    return pairs[_WARM_UP:]


async def _run(arguments: argparse.Namespace, url: str, worker: str, secret: MeshSecret) -> None:
    async with http_load(url, arguments.model) as http, direct_load(worker, secret) as direct:
        pairs = await paired_ttfts(http.send, direct.send, arguments.requests)
    through, straight = (statistics.median(values) for values in zip(*pairs, strict=True))
    added = sorted(mesh - alone for mesh, alone in pairs)
    quarter = len(added) // 4
    print(f"TTFT p50 through the mesh {through:.2f} ms, direct {straight:.2f} ms, {len(pairs)} pairs")
    print(f"added: {through - straight:.2f} ms between medians; {statistics.median(added):.2f} ms median of pairs")
    print(f"middle half of pairs: {added[quarter]:.2f} to {added[-quarter - 1]:.2f} ms")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 without a local mesh."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--state", type=Path, help="state directory of the mesh")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="public name of the model")
    parser.add_argument("--requests", type=int, default=100, help="pairs")
    arguments = parser.parse_args(argv)
    state = StateDir(state_path(arguments.state))
    try:
        snapshot = state.snapshot()
    except NotRunningError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    worker = next(one["address"] for one in snapshot["processes"] if one["kind"] == "worker")
    secret = MeshSecret(state.secret_file.read_text().strip())
    asyncio.run(_run(arguments, f"http://{reachable(snapshot['http'])}", worker, secret))
    return 0


if __name__ == "__main__":
    sys.exit(main())
