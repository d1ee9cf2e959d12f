"""One worker or two for a request, as the router decides it: by load, prompt length and link. Pure.

A worker for prompts is idle, one for outputs has so many running streams; both have the speed of `costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.blocks import BlockId
from services.common.registry import LocationRecord
from services.common.step_costs import StepCosts
from services.router.admission import AdmissionConfig
from services.router.domain import Ask, AttemptId, HolderLinks, Identity, Load, MeasuredLink, Placement, WorkerId
from services.router.holders import Holders
from services.router.index.replica import Replica
from services.router.placement import PlacementConfig, Placer
from services.router.workers import WorkerTable

_DIGEST = b"m" * 16
_BLOCK_TOKENS = 16
_CELL = 34


@dataclass(frozen=True)
class Speed:
    """Of both workers. bytes_per_token: of the KV cache."""

    costs: StepCosts
    prefill_tokens_per_s: float
    decode_step_s: float
    bytes_per_token: int


# Assumed, neither is measured: a CPU worker with one thread and SmolLM2-135M, and an accelerator with an 8B model.
CPU = Speed(StepCosts(0.012, 0.01, 0.0011, 2e-7, 0.002, 4e-7), 700.0, 0.025, 23_040)
ACCELERATOR = Speed(StepCosts(0.006, 0.002, 2e-5, 0.0, 5e-5, 0.0), 50_000.0, 0.008, 131_072)


@dataclass(frozen=True)
class Choice:
    """What was decided. ttft_s: predicted."""

    streams: int
    prompt_tokens: int
    is_pair: bool
    ttft_s: float


def choices(speed: Speed, streams: Sequence[int], lengths: Sequence[int], *, link_bytes_per_s: float) -> list[Choice]:
    """One for each load and length."""
    return [_choice(speed, count, length, link_bytes_per_s) for count in streams for length in lengths]


def plot(panels: dict[str, Sequence[Choice]]) -> str:
    """An SVG with a grid for each panel: dark where two workers share a request."""
    parts, top = [], 40
    width = 0
    for title, found in panels.items():
        streams = sorted({one.streams for one in found}, reverse=True)
        lengths = sorted({one.prompt_tokens for one in found})
        parts.append(f'<text x="12" y="{top - 14}" font-size="12" font-weight="bold">{title}</text>')
        for one in found:
            x, y = 60 + lengths.index(one.prompt_tokens) * _CELL, top + streams.index(one.streams) * _CELL
            fill = "#1f4e79" if one.is_pair else "#d9e2ec"
            parts.append(f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}" fill="{fill}"/>')
        for row, count in enumerate(streams):
            parts.append(f'<text x="52" y="{top + row * _CELL + 20}" font-size="10" text-anchor="end">{count}</text>')
        bottom = top + len(streams) * _CELL
        for column, length in enumerate(lengths):
            x = 60 + column * _CELL + _CELL // 2
            parts.append(f'<text x="{x}" y="{bottom + 12}" font-size="10" text-anchor="middle">{length}</text>')
        parts.append(f'<text x="60" y="{bottom + 26}" font-size="10">prompt tokens; rows: running streams</text>')
        width = max(width, 72 + len(lengths) * _CELL)
        top = bottom + 60
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top - 20}" font-family="sans-serif">'
    key = '<text x="12" y="14" font-size="12">dark: prompt and output at two workers; light: at one</text>'
    return "\n".join([head, f'<rect width="{width}" height="{top - 20}" fill="white"/>', key, *parts, "</svg>\n"])


def _choice(speed: Speed, streams: int, prompt_tokens: int, link_bytes_per_s: float) -> Choice:
    table = WorkerTable(pending_timeout_s=5.0)
    holders = Holders(Replica(), table, {})
    placer = Placer(PlacementConfig("predicted_ttft", AdmissionConfig(1e6)), table, holders)
    link = HolderLinks("worker/p@1", MeasuredLink(link_bytes_per_s, 0.002))
    _add(table, "p", "prefill", speed, _load(speed, 0))
    _add(table, "d", "decode", speed, _load(speed, streams, link))
    holders.changed()
    ids = [BlockId(number.to_bytes(16, "little")) for number in range(prompt_tokens // _BLOCK_TOKENS)]
    ask = Ask(
        id=AttemptId("r", 1),
        model="m",
        model_digest=_DIGEST,
        block_ids=ids,
        prompt_tokens=prompt_tokens,
        max_output_tokens=128,
        can_hand_off=True,
    )
    answer = placer.place(ask, 0.0)
    assert isinstance(answer, Placement)
    return Choice(streams, prompt_tokens, answer.handoff is not None, answer.predicted_ttft_s)


def _load(speed: Speed, streams: int, *links: HolderLinks) -> Load:
    return Load(
        progress=1,
        ready=True,
        draining=False,
        running_requests=streams,
        waiting_requests=0,
        queued_prefill_tokens=0,
        decoding_sequences=streams,
        free_blocks=100_000,
        context_tokens=500 * streams,
        step_costs=speed.costs,
        holders=links,
    )


def _add(table: WorkerTable, name: str, role: str, speed: Speed, load: Load) -> None:
    worker_id = WorkerId(name)
    table.add(
        LocationRecord(kind="worker", id=name, epoch=1, host="h", grpc_address=f"{name}:1", pull_address=f"{name}:2")
    )
    identity = Identity(
        worker_id=worker_id,
        epoch=1,
        model="m",
        model_digest=_DIGEST,
        context_length=32_768,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        weight_format="",
        block_tokens=_BLOCK_TOKENS,
        layout_version=1,
        vocab_size=1,
        tokenizer_digest=b"",
        total_blocks=100_000,
        block_bytes=_BLOCK_TOKENS * speed.bytes_per_token,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
        decode_step_s=speed.decode_step_s,
        step_token_budget=256,
        max_running_requests=64,
        role=role,
    )
    table.identify(worker_id, identity, 0.0)
    table.report(worker_id, load, 0.0)
