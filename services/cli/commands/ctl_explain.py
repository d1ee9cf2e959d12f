"""`kvmesh ctl explain`: why a request went where it went, and how right the forecast was."""

from __future__ import annotations

import json

import grpc
import typer
from kvmesh.v1 import control_pb2 as pb

from services.cli.commands.arguments import StateOption
from services.cli.commands.ctl import JsonOption, RouterOption, SecretOption, row, show_rows
from services.cli.commands.ctl_control import KeyOption, control
from services.cli.control_client import describe
from services.cli.errors import CliError


def explain(
    request_id: str = typer.Argument(help="The response's x-request-id."),
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Every decision on a request: candidates, terms, choice or refusal, and forecast against what happened."""
    request = pb.ExplainRequest(request_id=request_id)
    client = control(router, secret_file, key_file, state)
    replies, errors = client.everywhere(lambda stub, options: stub.Explain(request, **options))
    silent = [describe(address, e) for address, e in errors.items() if e.code() != grpc.StatusCode.NOT_FOUND]
    records = [(address, record) for address, reply in replies.items() for record in reply.decisions]
    if not records:
        raise CliError("; ".join(silent) or f"no router has decided on {request_id!r} lately")
    records.sort(key=lambda pair: -pair[1].age_s)
    if as_json:
        typer.echo(json.dumps([{"router": address, **row(record)} for address, record in records], indent=1))
    else:
        for address, record in records:
            _print(address, record)
    for line in silent:
        typer.echo(line, err=True)


def _print(router: str, record: pb.DecisionRecord) -> None:
    typer.echo(
        f"{record.request_id} attempt {record.attempt}: {record.age_s:.1f} s ago by router {router}; "
        f"{record.model} {record.model_digest[:12]}, {record.prompt_tokens} prompt tokens"
    )
    if record.refusal:
        retry = f"; try again in {record.retry_after_s:.1f} s" if record.retry_after_s else ""
        typer.echo(f"  refused: {record.refusal}: {record.detail}{retry}")
        return
    typer.echo(
        f"  {record.worker_id} of {record.num_candidates} by {record.policy}; of {record.prompt_blocks} blocks "
        f"{record.local_blocks} are there and {record.pulled_blocks} were to be pulled"
    )
    if record.handoff_worker_id:
        typer.echo(f"  {record.handoff_worker_id} takes over once the prompt has been computed")
    typer.echo(f"  TTFT: {_against(record.predicted_ttft_s, record.ttft_s)}")
    typer.echo(f"  TPOT: {_against(record.predicted_tpot_s, record.tpot_s)}")
    typer.echo(f"  outcome: {record.outcome or 'still open'}, {record.output_tokens} output tokens")
    show_rows([_candidate(one) for one in record.candidates], False)


def _against(predicted_s: float, actual_s: float) -> str:
    forecast = f"{predicted_s * 1e3:.1f} ms predicted"
    return f"{forecast}, {actual_s * 1e3:.1f} ms measured" if actual_s else f"{forecast}, none measured"


def _candidate(candidate: pb.Candidate) -> dict[str, object]:
    terms = {name: round(value, 6) for name, value in sorted(candidate.terms.items())}
    return {"worker_id": candidate.worker_id, "score": round(candidate.score, 6), **terms}
