"""`python -m bench.sim_mesh TRACE...`: placement policies on real processes whose workers only take the time.

Eight simulated workers behind the real Envoy, gateway, router and Valkey; a fresh mesh for each policy. Traces are
replayed at toy scale (`sim_mesh_load`): lengths divided by 32, and so are the speed of the workers' prefill, 20,000
tokens/s, and their cache, 400,000 tokens. Traces of sessions, whose prompts are short, are divided by 8 and meet the
same workers, which then stand for a fourth of that. `--replicas`: also with four routers and two gateways. The load
runs on the same cores as the mesh: the cores that each took are printed, and how late simulated steps were; where these
are not small the machine was the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import structlog
from rich.console import Console
from rich.table import Table

from bench.kv_node import cpu_seconds
from bench.kv_table import Machine
from bench.load_http import http_load
from bench.sim_mesh_load import Outcome, Workload, outcome, run, toy_scale
from services.cli.ports import free_ports
from services.common.blocks import BLOCK_TOKENS
from services.common.models import DEFAULT_MODEL
from services.common.time_model import TimeModel
from services.gateway.config import GatewaySettings
from services.router.config import RouterSettings
from services.router.policies import POLICIES
from services.router.simulator.job import WorkerProfile
from services.router.simulator.scenario import Scenario
from services.router.simulator.simulation import simulate
from services.router.simulator.summary import summarise
from services.router.simulator.trace import compress, read_trace, repeat
from services.worker.config import WorkerSettings

RESULTS = Path(__file__).parent / "results" / "sim_mesh.json"
SCALE, SESSION_SCALE = 32, 8
CACHED_TOKENS = 400_000 // SCALE
TIMES = TimeModel(20_000 / SCALE, decode_step_s=0.02, decode_sequence_s=0.0005)
# Of the default model, less the room of an answer.
CONTEXT_LENGTH = 8_000
STEP_TOKENS, MAX_RUNNING = 64, 32
TTFT_S, TPOT_S = 2.0, 0.2
_PATIENCE_S = 10.0
_WORKER = {
    "KVMESH_WORKER_SIM_PREFILL_TOKENS_PER_S": str(TIMES.prefill_tokens_per_s),
    "KVMESH_WORKER_SIM_DECODE_STEP_S": str(TIMES.decode_step_s),
    "KVMESH_WORKER_SIM_DECODE_SEQUENCE_S": str(TIMES.decode_sequence_s),
    "KVMESH_WORKER_NUM_BLOCKS": str(CACHED_TOKENS // BLOCK_TOKENS),
    # So short that decodes are not held up for longer than the objective allows; no budget is smaller.
    "KVMESH_WORKER_STEP_TOKEN_BUDGET": str(STEP_TOKENS),
    "KVMESH_WORKER_MAX_RUNNING": str(MAX_RUNNING),
    "KVMESH_LOG_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one mesh. late_ms: mean of the steps that were slept for. imbalance: most computed to mean computed.

    simulated: what the simulator says of the same load. cores: CPU seconds that each kind of process took a second, the
    load generator's own as "load".
    """

    trace: str
    policy: str
    routers: int
    gateways: int
    outcome: Outcome
    imbalance: float
    late_ms: float
    cores: dict[str, float]
    simulated: dict[str, str | int | float]


class SimMesh:
    """A running mesh."""

    def __init__(self, url: str, processes: Sequence[dict[str, Any]]) -> None:
        self.url = url
        self._processes = processes

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of every kind of process, and of this one."""
        found = {"load": cpu_seconds(os.getpid())}
        for process in self._processes:
            found[process["kind"]] = found.get(process["kind"], 0.0) + cpu_seconds(process["pid"])
        return found

    def worker_totals(self, metric: str) -> list[float]:
        """The sum of a metric's series at each worker."""
        return [_total(one["metrics"], metric) for one in self._processes if one["kind"] == "worker"]


@contextmanager
def sim_mesh(workers: int, routers: int, gateways: int, policy: str) -> Iterator[SimMesh]:
    """Started by `kvmesh up`, stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="kvm-") as folder:
        port = next(free_ports())
        counts = {"workers": workers, "routers": routers, "gateways": gateways, "kvstores": 0}
        sizes = [part for name, count in counts.items() for part in (f"--{name}", str(count))]
        options = (*sizes, "--policy", policy, "--http-port", str(port), "--start-timeout-s", "300")
        _kvmesh(folder, "up", "--detach", "--engine", "sim", *options)
        try:
            yield SimMesh(f"http://127.0.0.1:{port}", json.loads(_kvmesh(folder, "ps", "--json")))
        finally:
            _kvmesh(folder, "down")


def measure(
    name: str, workload: Workload, *, workers: int, policy: str, routers: int = 1, gateways: int = 1
) -> Measured:
    """Replay a workload on a fresh mesh."""
    with sim_mesh(workers, routers, gateways, policy) as mesh:
        before = mesh.cpu_s()
        wall_s, served = asyncio.run(_replay(mesh.url, workload))
        cores = {kind: round((used - before[kind]) / wall_s, 3) for kind, used in mesh.cpu_s().items()}
        computed = [
            prompts - cached
            for prompts, cached in zip(
                mesh.worker_totals("kvmesh_prompt_tokens_total"),
                mesh.worker_totals("kvmesh_cached_prompt_tokens_total"),
                strict=True,
            )
        ]
        late_s = sum(mesh.worker_totals("kvmesh_sim_late_seconds_sum"))
        steps = sum(mesh.worker_totals("kvmesh_sim_late_seconds_count"))
    return Measured(
        trace=name,
        policy=policy,
        routers=routers,
        gateways=gateways,
        outcome=served,
        imbalance=max(computed) * len(computed) / max(1.0, sum(computed)),
        late_ms=1e3 * late_s / max(1.0, steps),
        cores=cores,
        simulated=simulated(workload, workers, policy),
    )


def simulated(workload: Workload, workers: int, policy: str) -> dict[str, str | int | float]:
    """The simulator's figures of the load on workers like these, behind one router and gateway."""
    max_queue_s = WorkerSettings.model_fields["max_queue_s"].default
    scenario = Scenario(
        WorkerProfile(TIMES, CACHED_TOKENS, BLOCK_TOKENS, STEP_TOKENS, MAX_RUNNING, max_queue_s),
        workers,
        policy,
        RouterSettings.model_fields["max_queue_s"].default,
        ttft_objective_s=TTFT_S,
        tpot_objective_s=TPOT_S,
        patience_s=GatewaySettings.model_fields["max_wait_s"].default,
        tells_objectives=False,
    )
    return summarise(scenario, workload.trace, *simulate(scenario, workload.trace)).as_json()


async def _replay(url: str, workload: Workload) -> tuple[float, Outcome]:
    loop = asyncio.get_running_loop()
    async with http_load(url, DEFAULT_MODEL) as load:
        started_s = loop.time()
        timings, refused, unfinished = await run(load.send, workload.requests, _PATIENCE_S)
        wall_s = loop.time() - started_s
    return wall_s, outcome(workload, timings, refused, unfinished, ttft_s=TTFT_S, tpot_s=TPOT_S)


def _kvmesh(folder: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "services.cli", *arguments, "--state", folder]
    done = subprocess.run(command, env={**os.environ, **_WORKER}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"kvmesh {arguments[0]}: {done.stdout}{done.stderr}")
    return done.stdout


def _total(address: str, metric: str) -> float:
    with urlopen(f"http://{address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{metric}{{", f"{metric} ")))


def _table(found: Sequence[Measured]) -> Table:
    table = Table(
        *("trace", "policy", "routers, gateways", "goodput/s", "TTFT p50 s", "p99 s", "TPOT p50 ms", "hit %"),
        *(
            "of ideal %",
            "imbalance",
            "refused",
            "unfinished",
            "late ms",
            "cores",
            "simulated: goodput/s",
            "p50 s",
            "hit %",
        ),
    )
    for one in found:
        seen = one.outcome
        table.add_row(
            *(one.trace, one.policy, f"{one.routers}, {one.gateways}", f"{seen.goodput_rps:.2f}"),
            *(f"{seen.ttft_p50_s:.2f}", f"{seen.ttft_p99_s:.2f}", f"{1e3 * seen.tpot_p50_s:.0f}"),
            *(f"{seen.hit_rate:.1%}", f"{seen.hit_rate_of_ideal:.0%}", f"{one.imbalance:.2f}", str(seen.refused)),
            *(str(seen.unfinished), f"{one.late_ms:.1f}", f"{sum(one.cores.values()):.2f}"),
            *(f"{one.simulated['goodput_rps']:.2f}", f"{one.simulated['ttft_p50_s']:.2f}"),
            f"{one.simulated['hit_rate']:.1%}",
        )
    return table


def _workload(path: Path, arguments: argparse.Namespace) -> Workload:
    trace, scale, load = read_trace(path), SCALE, arguments.load
    if trace.has_sessions:
        trace, scale, load = repeat(trace, arguments.copies), SESSION_SCALE, arguments.session_load
    return toy_scale(compress(trace, load), scale, arguments.seconds, CONTEXT_LENGTH)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="files that `kvmesh simulate` reads")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the trace, after compression")
    parser.add_argument("--load", type=float, default=4.0, help="times as dense as a trace without sessions")
    parser.add_argument("--session-load", type=float, default=20.0, help="times as dense as sessions of a trace begin")
    parser.add_argument("--copies", type=int, default=2, help="of a trace of sessions, overlaid")
    parser.add_argument("--replicas", action="store_true", help="also with four routers and two gateways")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    # The simulated router's log of every request that has to wait.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    found: list[Measured] = []
    for path in arguments.traces:
        name, workload = path.name.partition(".")[0], _workload(path, arguments)
        sizes = [(1, 1), (4, 2)] if arguments.replicas else [(1, 1)]
        for routers, gateways in sizes:
            for policy in arguments.policies:
                more = {"policy": policy, "routers": routers, "gateways": gateways}
                found.append(measure(name, workload, workers=arguments.workers, **more))
                print(json.dumps(asdict(found[-1])), file=sys.stderr)
    Console(width=200).print(_table(found))
    objectives = {"ttft_s": TTFT_S, "tpot_s": TPOT_S}
    flags = {name: value for name, value in vars(arguments).items() if name not in ("output", "traces")}
    report = {"machine": asdict(Machine.here()), "flags": flags, "objectives": objectives}
    arguments.output.write_text(json.dumps({**report, "runs": [asdict(one) for one in found]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
