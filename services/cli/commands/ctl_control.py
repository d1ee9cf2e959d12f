"""`kvmesh ctl models | register | unregister | traffic | rollback | drain | undrain | list`: the control API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from kvmesh.v1 import control_pb2 as pb
from kvmesh.v1 import router_pb2

from services.cli.commands.arguments import StateOption, state_dir
from services.cli.commands.ctl import (
    JsonOption,
    RouterOption,
    SecretOption,
    mesh_secret,
    router_addresses,
    row,
    show_rows,
)
from services.cli.control_client import ControlClient
from services.cli.errors import CliError

_POLL_S = 0.2
_SHOWN_DIGITS = 12
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file", envvar="KVMESH_ADMIN_KEY_FILE", help="File of an admin key; default: the local mesh's."
    ),
]
NameArgument = Annotated[str, typer.Argument(help="Public name of a model.")]
VersionArgument = Annotated[str, typer.Argument(help="Version label, digest, or the first 8 digits of it or more.")]
WorkerArgument = Annotated[str, typer.Argument(help="Worker, as `kvmesh ctl workers` names it.")]


def control(router: str, secret_file: Path | None, key_file: Path | None, state: Path | None) -> ControlClient:
    """The control API that a command means. Raises CliError."""
    path = key_file or state_dir(state).admin_key_file
    try:
        key = path.read_text().strip()
    except OSError as error:
        raise CliError(f"admin key {path}: {error.strerror}") from None
    return ControlClient(router_addresses(router, state), mesh_secret(secret_file, state), key)


def models(
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Public names, their versions, traffic weights and replicas."""
    request = pb.ListModelVersionsRequest()
    client = control(router, secret_file, key_file, state)
    answer = client.call(lambda stub, options: stub.ListModels(request, **options))
    show_rows([line for model in answer.models for line in _version_rows(model, as_json)], as_json)


def register(
    name: NameArgument,
    digest: Annotated[str, typer.Argument(help="Model digest; its first 8 digits or more, where a worker has it.")],
    version: Annotated[str, typer.Option("--version", help="Label; default: the digest's first digits.")] = "",
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Register a digest as a version of a public name."""
    request = pb.RegisterModelRequest(name=name, digest=digest, version=version)
    client = control(router, secret_file, key_file, state)
    _show_model(client.call(lambda stub, options: stub.RegisterModel(request, **options)), as_json)


def unregister(
    name: NameArgument,
    version: VersionArgument,
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Forget a version that has no traffic."""
    request = pb.UnregisterModelRequest(name=name, version=version)
    client = control(router, secret_file, key_file, state)
    _show_model(client.call(lambda stub, options: stub.UnregisterModel(request, **options)), as_json)


def traffic(
    name: NameArgument,
    weights: Annotated[list[str] | None, typer.Argument(help="VERSION=WEIGHT of each; none: show them.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take all weights away: every digest gets traffic.")] = False,
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Show or set how requests are shared out among the versions of a public name."""
    if weights and clear:
        raise CliError("--clear takes no weights")
    client = control(router, secret_file, key_file, state)
    if weights or clear:
        request = pb.SetTrafficRequest(name=name, weights=_weights(weights or []))
        _show_model(client.call(lambda stub, options: stub.SetTraffic(request, **options)), as_json)
        return
    listed = client.call(lambda stub, options: stub.ListModels(pb.ListModelVersionsRequest(), **options)).models
    found = [model for model in listed if model.name == name]
    if not found:
        raise CliError(f"no model is called {name!r}")
    _show_model(found[0], as_json)


def rollback(
    name: NameArgument,
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Give all traffic back to the version that had it before the rollout."""
    request = pb.RollbackRequest(name=name)
    client = control(router, secret_file, key_file, state)
    _show_model(client.call(lambda stub, options: stub.Rollback(request, **options)), as_json)


def drain(
    worker: WorkerArgument,
    wait_s: Annotated[float, typer.Option(min=0, help="Wait so long for its running requests to end.")] = 0.0,
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """No new requests for a worker until `undrain` or its next start; exit status 1 when the wait was too short."""
    client = control(router, secret_file, key_file, state)
    request = pb.DrainWorkerRequest(worker_id=worker)
    view = client.call(lambda stub, options: stub.Drain(request, **options))
    if wait_s:
        view = _idle(client, view, wait_s)
    show_rows([row(view)], as_json) if as_json else typer.echo(_drain_line(view))
    if wait_s and _unfinished(view):
        raise typer.Exit(1)


def undrain(
    worker: WorkerArgument,
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """New requests for a worker again."""
    request = pb.UndrainWorkerRequest(worker_id=worker)
    client = control(router, secret_file, key_file, state)
    view = client.call(lambda stub, options: stub.Undrain(request, **options))
    show_rows([row(view)], as_json) if as_json else typer.echo(_drain_line(view))


def list_all(
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Models, workers and kvstores, as one router knows them."""
    client = control(router, secret_file, key_file, state)
    answer = client.call(lambda stub, options: stub.List(pb.ListRequest(), **options))
    if as_json:
        typer.echo(json.dumps(row(answer), indent=1))
        return
    sections: tuple[tuple[str, list[dict[str, object]]], ...] = (
        ("models", [line for model in answer.models for line in _version_rows(model, False)]),
        ("workers", [row(view) for view in answer.workers]),
        ("kvstores", [row(view) for view in answer.kvstores]),
    )
    for title, rows in sections:
        typer.echo(title)
        show_rows(rows, False)
    if not answer.redis_connected:
        typer.echo("redis does not answer this router")


def _weights(given: list[str]) -> dict[str, int]:
    weights: dict[str, int] = {}
    for one in given:
        version, _, weight = one.rpartition("=")
        if not version or not weight.isdecimal() or len(weight) > 9:
            raise CliError(f"{one!r}: not VERSION=WEIGHT with a whole number")
        weights[version] = int(weight)
    return weights


def _show_model(model: pb.ModelVersions, as_json: bool) -> None:
    show_rows(_version_rows(model, as_json), as_json)
    if model.rollback_to and not as_json:
        typer.echo(f"`kvmesh ctl rollback {model.name}` gives all traffic to {model.rollback_to}")


def _version_rows(model: pb.ModelVersions, whole: bool) -> list[dict[str, object]]:
    """A line for each version, without what is not known; whole: digests are not shortened."""
    lines: list[dict[str, object]] = [
        {
            "model": model.name,
            "version": version.version or None,
            "digest": version.digest if whole else version.digest[:_SHOWN_DIGITS],
            "weight": version.weight if model.weighted else None,
            "replicas": version.replicas,
            "ready_replicas": version.ready_replicas,
            "weight_format": version.weight_format or None,
            "dtype": version.dtype or None,
        }
        for version in model.versions
    ]
    return [{name: value for name, value in line.items() if value is not None} for line in lines]


def _unfinished(view: router_pb2.WorkerView) -> int:
    return view.running_requests + view.waiting_requests + view.pending_attempts


def _idle(client: ControlClient, view: router_pb2.WorkerView, wait_s: float) -> router_pb2.WorkerView:
    """The worker once it has nothing to do, or as it is at the end of the wait."""
    ends_s = time.monotonic() + wait_s

    async def work(stub: Any, options: dict[str, Any]) -> router_pb2.WorkerView:
        found = view
        while _unfinished(found) and time.monotonic() < ends_s:
            await asyncio.sleep(_POLL_S)
            workers = (await stub.List(pb.ListRequest(), **options)).workers
            same = [one for one in workers if (one.worker_id, one.epoch) == (view.worker_id, view.epoch)]
            if not same:
                raise CliError(f"{view.worker_id} is gone")
            found = same[0]
        return found

    return client.call(work)


def _drain_line(view: router_pb2.WorkerView) -> str:
    state = "drained" if view.drained else "takes requests"
    return f"{view.worker_id}: {state}; {view.running_requests} running, {view.waiting_requests} waiting"


COMMANDS: dict[str, Callable[..., None]] = {
    "models": models,
    "register": register,
    "unregister": unregister,
    "traffic": traffic,
    "rollback": rollback,
    "drain": drain,
    "undrain": undrain,
    "list": list_all,
}
