"""Versions and decisions as messages."""

from __future__ import annotations

from kvmesh.v1 import control_pb2

from services.router.control.plane import Adapter, PublicModel, Version
from services.router.explanations import Decision


def model_versions(model: PublicModel) -> control_pb2.ModelVersions:
    """A public name with its versions."""
    return control_pb2.ModelVersions(
        name=model.name,
        versions=map(_version, model.versions),
        weighted=bool(model.entry.weights),
        rollback_to=model.entry.label_of(model.entry.rollback_to),
    )


def adapter_view(adapter: Adapter) -> control_pb2.AdapterView:
    """A registered adapter."""
    return control_pb2.AdapterView(
        name=adapter.name,
        model=adapter.model,
        path=adapter.entry.path,
        digest=adapter.entry.digest,
        rank=adapter.entry.rank,
        created_s=adapter.entry.created_s,
        resident_workers=adapter.resident_workers,
    )


def decision_record(decision: Decision, now_s: float) -> control_pb2.DecisionRecord:
    """One decision. now_s: monotonic, as it was decided by."""
    record = control_pb2.DecisionRecord(
        request_id=decision.id.request_id,
        attempt=decision.id.attempt,
        age_s=now_s - decision.decided_s,
        model=decision.model,
        model_digest=decision.model_digest.hex(),
        prompt_tokens=decision.prompt_tokens,
        prompt_blocks=decision.prompt_blocks,
        worker_id=decision.worker_id,
        policy=decision.policy,
        local_blocks=decision.local_blocks,
        pulled_blocks=decision.pulled_blocks,
        handoff_worker_id=decision.handoff_worker_id,
        predicted_ttft_s=decision.predicted_ttft_s,
        predicted_tpot_s=decision.predicted_tpot_s,
    )
    if decision.candidates is not None:
        record.num_candidates = decision.candidates.total
        for worker_id, score, terms in decision.candidates.rows():
            record.candidates.add(worker_id=worker_id, score=score, terms=terms)
    if decision.refused is not None:
        record.refusal = decision.refused.reason.value
        record.detail = decision.refused.detail
        record.retry_after_s = decision.refused.retry_after_s
    if decision.ended is not None:
        ended = decision.ended
        record.outcome, record.output_tokens = ended.outcome, ended.output_tokens
        record.ttft_s, record.tpot_s = ended.ttft_s, ended.tpot_s
    return record


def _version(version: Version) -> control_pb2.ModelVersionView:
    served = version.served
    return control_pb2.ModelVersionView(
        version=version.label,
        digest=version.digest,
        weight=version.weight,
        replicas=version.replicas,
        ready_replicas=served.ready_replicas if served else 0,
        weight_format=served.identity.weight_format if served else "",
        dtype=served.identity.dtype if served else "",
    )
