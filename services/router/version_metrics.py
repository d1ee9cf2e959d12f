"""What became of the attempts of each version of a model: outcomes, times to first tokens, times of further ones.

Labels are the public name and the first digits of the model digest: as many series as versions were seen.
"""

from __future__ import annotations

from opentelemetry import metrics

DIGEST_DIGITS = 12


class VersionMetrics:
    """The instruments."""

    def __init__(self) -> None:
        meter = metrics.get_meter("kvmesh.router")
        self._attempts = meter.create_counter(
            "kvmesh_router_version_attempts", description="Attempts that gateways closed, by version and outcome."
        )
        self._ttft = meter.create_histogram(
            "kvmesh_router_version_ttft_seconds", unit="s", description="Ask to first token, by version."
        )
        self._tpot = meter.create_histogram(
            "kvmesh_router_version_tpot_seconds", unit="s", description="Time of each further token, by version."
        )

    def closed(self, model: str, model_digest: bytes, outcome: str, ttft_s: float, tpot_s: float) -> None:
        """A gateway has closed an attempt; ttft_s and tpot_s are 0 when there was no such time."""
        version = {"model": model, "digest": model_digest.hex()[:DIGEST_DIGITS]}
        self._attempts.add(1, {**version, "outcome": outcome})
        if ttft_s > 0:
            self._ttft.record(ttft_s, version)
        if tpot_s > 0:
            self._tpot.record(tpot_s, version)
