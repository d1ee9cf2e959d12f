"""Compares the canary with the stable version: by fixed probes, and by a share of the traffic. Fails with CliError."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from services.cli.canary_options import CanaryOptions
from services.cli.canary_probes import SCORED_TOKENS, probe
from services.cli.canary_verdict import Probed, Traffic, probe_failure, traffic_failure
from services.cli.errors import CliError
from services.cli.probe_client import ProbeClient
from services.cli.probe_texts import TEXTS
from services.cli.version_counts import Counts, fetch_counts, traffic
from services.common.models import ModelSource
from services.common.text.model_tokenizer import load_tokenizer

_POLL_S = 0.5


class Analysis:
    """stable, canary: a worker of each version. check: raises when the canary's process is not well."""

    def __init__(
        self,
        options: CanaryOptions,
        *,
        stable: ProbeClient,
        canary: ProbeClient,
        routers: Sequence[str],
        check: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        """routers: their metrics addresses."""
        self._options = options
        self._workers = (stable, canary)
        self._routers = routers
        self._check = check
        self._report = report
        self._texts: list[list[int]] = []
        self._before: dict[str, Counts] = {}

    async def read_texts(self, source: ModelSource) -> None:
        """Take the reference texts, as the artifact's tokenizer cuts them. Raises ConfigurationError."""
        tokenizer = (await asyncio.to_thread(load_tokenizer, source)).tokenizer
        texts = [tokenizer.encode(text, add_special_tokens=True).ids for text in TEXTS]
        self._texts = [text for text in texts if len(text) > SCORED_TOKENS + 1]

    async def probe(self) -> None:
        """Ask both versions the same."""
        stable, canary = await probe(self._workers, self._texts)
        self._check()
        if failure := probe_failure(stable, canary, self._options.limits):
            raise CliError(failure)
        self._report(f"probes pass: canary {_probes(canary)}; stable {_probes(stable)}")

    async def begin_traffic(self) -> None:
        """Count what becomes of attempts from now on."""
        self._before = await fetch_counts(self._routers)

    async def watch_traffic(self) -> None:
        """Return once the canary has had its number of requests, or its time is over."""
        began_s = time.monotonic()
        while True:
            stable, canary = await self._traffic()
            self._check()
            if failure := traffic_failure(stable, canary, self._options.limits):
                raise CliError(failure)
            if canary.attempts >= self._options.analysis_requests:
                break
            if time.monotonic() - began_s > self._options.analysis_s:
                break
            await asyncio.sleep(_POLL_S)
        self._report(f"traffic passes: canary {_traffic(canary)}; stable {_traffic(stable)}")

    async def _traffic(self) -> tuple[Traffic, Traffic]:
        now = await fetch_counts(self._routers)
        pages = [(self._before.get(address, {}), counts) for address, counts in now.items()]
        stable, canary = (traffic(pages, worker.identity.model_digest.hex()) for worker in self._workers)
        return stable, canary


def _probes(probed: Probed) -> str:
    return f"{probed.quality:.3f} nats a token, TTFT {probed.ttft_s * 1e3:.1f} ms, TPOT {probed.tpot_s * 1e3:.1f} ms"


def _traffic(seen: Traffic) -> str:
    times = f"TTFT {seen.ttft_s * 1e3:.1f} ms, TPOT {seen.tpot_s * 1e3:.1f} ms"
    return f"{seen.attempts} attempts, {seen.failed} failed, {times}"
