"""`kvmesh up` and `kvmesh down`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.commands.arguments import StateOption, state_dir
from services.cli.errors import CliError
from services.cli.options import MeshOptions, configured_redis_url, mesh_options
from services.cli.start import run_supervisor, start_detached, stop_supervisor
from services.cli.state import StateDir, state_path
from services.cli.supervisor import reachable
from services.common.models import resolve_model

_DOWN_TIMEOUT_S = 90.0


def up(
    workers: Annotated[int | None, typer.Option(help="Model replicas. (default: 1; 0 beside the next two)")] = None,
    prefill_workers: Annotated[
        int | None, typer.Option(help="Replicas that compute prompts for others. (default: 0)")
    ] = None,
    decode_workers: Annotated[
        int | None, typer.Option(help="Replicas that take over from those, or do all by themselves. (default: 0)")
    ] = None,
    kvstores: Annotated[int | None, typer.Option(help="Nodes of the KV tier. (default: 1)")] = None,
    routers: Annotated[int | None, typer.Option(help="Router replicas. (default: 1)")] = None,
    gateways: Annotated[int | None, typer.Option(help="Gateway replicas. (default: 1)")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model: a known name, PATH or NAME=PATH; repeat for more. (default: smollm2-135m)"),
    ] = None,
    on_demand: Annotated[
        list[str] | None,
        typer.Option(
            help="Model that is loaded when it is asked for, as with --model; repeat for more. (default: none)"
        ),
    ] = None,
    max_loaded_models: Annotated[
        int | None, typer.Option(help="Most of these at a time: the idlest goes for another. (default: 2)")
    ] = None,
    unload_idle_s: Annotated[
        float | None, typer.Option(help="They go when nobody has used them for so long; 0: never. (default: 300)")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="model, or sim: workers that only take the time of one. (default: model)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. (default: cpu)")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32. (default: bfloat16)")] = None,
    weight_dtype: Annotated[
        str | None,
        typer.Option(help="dtype, int8, int8-dynamic, int4 or float8: what weights are rounded to. (default: dtype)"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads of a worker. (default: the cores shared out)")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Processes of a worker that share every layer. (default: 1)")
    ] = None,
    pipeline_parallel: Annotated[
        int | None, typer.Option(help="Groups of these, each with some of the layers. (default: 1)")
    ] = None,
    expert_parallel: Annotated[
        int | None, typer.Option(help="Parts of a worker's experts, in processes of their own. (default: 1)")
    ] = None,
    kv_cache_mb: Annotated[int | None, typer.Option(help="KV cache of a worker, MiB. (default: 1024)")] = None,
    kvstore_mb: Annotated[int | None, typer.Option(help="Memory of a kvstore node, MiB. (default: 1024)")] = None,
    kvstore_ssd_mb: Annotated[
        int | None, typer.Option(help="SSD of a kvstore node below the state directory, MiB. (default: none)")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="How routers choose: predicted_ttft, e2, prefix_hash, least_loaded or round_robin."
            " (default: predicted_ttft)"
        ),
    ] = None,
    http_host: Annotated[str | None, typer.Option(help="Address that Envoy listens on. (default: 127.0.0.1)")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port that Envoy listens on. (default: 8080)")] = None,
    redis: Annotated[
        str | None, typer.Option(help="Redis URL. (default: $REDIS_URL, else a Valkey of the mesh's own)")
    ] = None,
    trace_sampling_percent: Annotated[
        float | None,
        typer.Option(help="Traces begun at Envoy that are kept, where OTEL_* names a collector. (default: 100)"),
    ] = None,
    start_timeout_s: Annotated[float | None, typer.Option(help="Longest start. (default: 180)")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the mesh serves.")] = False,
    state: StateOption = None,
) -> None:
    """Start a mesh on this machine."""
    options = mesh_options(
        workers=workers,
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
        kvstores=kvstores,
        routers=routers,
        gateways=gateways,
        models=tuple(model) if model else None,
        on_demand=tuple(on_demand) if on_demand else None,
        max_loaded_models=max_loaded_models,
        unload_idle_s=unload_idle_s,
        engine=engine,
        device=device,
        dtype=dtype,
        weight_dtype=weight_dtype,
        threads=threads,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
        kv_cache_mb=kv_cache_mb,
        kvstore_mb=kvstore_mb,
        kvstore_ssd_mb=kvstore_ssd_mb,
        policy=policy,
        http_host=http_host,
        http_port=http_port,
        redis_url=redis or configured_redis_url(),
        trace_sampling_percent=trace_sampling_percent,
        start_timeout_s=start_timeout_s,
    )
    console, started = Console(highlight=False), time.monotonic()
    directory = state_dir(state)

    def report(line: str) -> None:
        console.print(line, style="dim", markup=False, soft_wrap=True)

    def welcome() -> None:
        _welcome(console, options, directory, time.monotonic() - started)

    if detach:
        start_detached(options, directory, report)
        welcome()
    else:
        run_supervisor(options, directory, report=report, on_ready=welcome)


def down(
    state: StateOption = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait before everything is killed.")] = _DOWN_TIMEOUT_S,
) -> None:
    """Stop the mesh: drain, then end every process."""
    directory = state_dir(state)
    if not stop_supervisor(directory, timeout_s):
        raise CliError(f"no mesh is running on {directory.root}")
    typer.echo("stopped")


def _welcome(console: Console, options: MeshOptions, directory: StateDir, took_s: float) -> None:
    url = f"http://{reachable(f'{options.http_host}:{options.http_port}')}"
    name = resolve_model((*options.models, *options.on_demand)[0]).name
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": name, "messages": [question], "max_tokens": 100, "stream": True})
    console.print(f"The mesh is ready on {url} ({took_s:.1f} s).", style="bold green")
    console.print(f"  curl -N {url}/v1/chat/completions -d '{body}'", markup=False, soft_wrap=True)
    console.print(
        f"  next: {_program()} chat | ps | logs worker-0 -f | down", style="dim", markup=False, soft_wrap=True
    )
    if directory.root != state_path(None):
        # Without it the commands above would look for another mesh.
        console.print(f"        each with --state {directory.root}", style="dim", markup=False, soft_wrap=True)


def _program() -> str:
    """The command as it was typed."""
    return sys.argv[0] if Path(sys.argv[0]).name == "kvmesh" else "kvmesh"
