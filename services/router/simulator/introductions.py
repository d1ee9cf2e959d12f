"""What simulated workers and nodes say of themselves when they join."""

from __future__ import annotations

from typing import Literal

from services.common.keys import life_key
from services.common.registry import LocationRecord
from services.common.step_costs import StepCosts
from services.common.time_model import TimeModel
from services.router.domain import HolderLinks, Identity, Load, MeasuredLink, WorkerId
from services.router.simulator.job import WorkerProfile
from services.router.simulator.lower_tiers import KV_BYTES_PER_TOKEN, TierProfile, node_name, worker_name

MODEL = "simulated"
MODEL_DIGEST = b"simulated model."
_CONTEXT_TOKENS = 1 << 20


def step_costs_of(model: TimeModel) -> StepCosts:
    """What such a worker learns of its steps."""
    return StepCosts(
        fixed_s=0.0,
        decoding_s=model.decode_step_s,
        prefill_token_s=1.0 / model.prefill_tokens_per_s,
        prefill_pair_s=0.0,
        decode_sequence_s=model.decode_sequence_s,
        context_token_s=model.context_s,
    )


def identity_of(worker_id: WorkerId, profile: WorkerProfile) -> Identity:
    """What such a worker says of itself."""
    return Identity(
        worker_id=worker_id,
        epoch=1,
        model=MODEL,
        model_digest=MODEL_DIGEST,
        context_length=_CONTEXT_TOKENS,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        weight_format="none",
        block_tokens=profile.block_tokens,
        layout_version=1,
        vocab_size=1,
        tokenizer_digest=b"",
        total_blocks=profile.num_blocks,
        block_bytes=profile.block_tokens * KV_BYTES_PER_TOKEN,
        prefill_tokens_per_s=profile.time_model.prefill_tokens_per_s,
        decode_step_s=profile.time_model.step_s(0, 1),
        step_token_budget=profile.step_token_budget,
        max_running_requests=profile.max_running,
    )


def record_of(kind: Literal["worker", "kvstore"], name: str, host: str, address: str) -> LocationRecord:
    """A location's record; without an address nobody pulls from it."""
    return LocationRecord(kind=kind, id=name, epoch=1, host=host, grpc_address=name, pull_address=address)


def links_of(num_workers: int, tiers: TierProfile | None) -> tuple[HolderLinks, ...]:
    """What every worker says of its links to all nodes and workers, as if it had learned them all."""
    if tiers is None:
        return ()
    ram, ssd = (MeasuredLink(link.bytes_per_s, link.setup_s) for link in (tiers.ram, tiers.ssd))
    nodes = (HolderLinks(life_key("kvstore", node_name(number), 1), ram, ssd) for number in range(num_workers))
    workers = (HolderLinks(life_key("worker", worker_name(number), 1), ram) for number in range(num_workers))
    return (*nodes, *workers)


def idle_load(profile: WorkerProfile, links: tuple[HolderLinks, ...]) -> Load:
    """Its first report."""
    return Load(
        progress=0,
        ready=True,
        draining=False,
        running_requests=0,
        waiting_requests=0,
        queued_prefill_tokens=0,
        decoding_sequences=0,
        free_blocks=profile.num_blocks,
        holders=links,
    )
