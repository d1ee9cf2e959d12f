"""What became of each version's attempts, from the metrics pages of the routers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from services.cli.canary_verdict import Traffic
from services.cli.probes import PROBE_TIMEOUT_S, http_exchange

# As routers shorten digests in labels.
_DIGEST_DIGITS = 12
_SAMPLE = re.compile(r"^kvmesh_router_version_(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
Counts = dict[tuple[str, str, str], float]


def read_counts(page: str) -> Counts:
    """Of a metrics page: values by metric (its name's end), digest and outcome, which is empty where there is none."""
    counts: Counts = {}
    for metric, labels, value in _SAMPLE.findall(page):
        named = dict(_LABEL.findall(labels))
        if "le" not in named:
            key = (metric, named.get("digest", ""), named.get("outcome", ""))
            counts[key] = counts.get(key, 0.0) + float(value)
    return counts


def traffic(pages: Iterable[tuple[Counts, Counts]], digest: str) -> Traffic:
    """Of one version: what is more in the second of each pair than in the first; a new router begins at 0."""
    sums: dict[tuple[str, str], float] = {}
    for before, now in pages:
        for (metric, of, outcome), value in now.items():
            if of == digest[:_DIGEST_DIGITS]:
                base = before.get((metric, of, outcome), 0.0)
                added = value - base if value >= base else value
                sums[metric, outcome] = sums.get((metric, outcome), 0.0) + added

    def mean(metric: str) -> float:
        count = sums.get((f"{metric}_seconds_count", ""), 0.0)
        return sums.get((f"{metric}_seconds_sum", ""), 0.0) / count if count else 0.0

    return Traffic(
        completed=round(sums.get(("attempts_total", "ok"), 0.0)),
        failed=round(sums.get(("attempts_total", "worker_failed"), 0.0)),
        timed=round(sums.get(("ttft_seconds_count", ""), 0.0)),
        ttft_s=mean("ttft"),
        tpot_s=mean("tpot"),
    )


async def fetch_counts(addresses: Iterable[str]) -> dict[str, Counts]:
    """By the metrics address of each router; one that does not answer is left out."""
    asked = list(addresses)
    pages = await asyncio.gather(*map(_page, asked))
    return {address: read_counts(page) for address, page in zip(asked, pages, strict=True) if page}


async def _page(address: str) -> str:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return (await http_exchange(address, "/metrics"))[1]
    except (OSError, TimeoutError, ValueError):
        return ""
