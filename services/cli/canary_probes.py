"""The fixed probes: both versions are asked the same in turn, so that what else the machine does meets both alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median

from services.cli.canary_verdict import Probed
from services.cli.probe_client import Answer, ProbeClient

# Of each text: tokens at its end whose probability is asked for, and of the greedy answer to what is before them.
SCORED_TOKENS = 10
ANSWER_TOKENS = 12


async def probe(workers: Sequence[ProbeClient], texts: Sequence[Sequence[int]]) -> list[Probed]:
    """What each worker makes of texts, given as tokens of which each has more than SCORED_TOKENS. Raises CliError."""
    answers: list[list[Answer]] = [[] for _ in workers]
    logprobs: list[list[float]] = [[] for _ in workers]
    for text in texts:
        prompt = text[:-SCORED_TOKENS]
        for worker, found in zip(workers, answers, strict=True):
            found.append(await worker.greedy(prompt, ANSWER_TOKENS))
    for text in texts:
        first = len(text) - SCORED_TOKENS
        for worker, likely in zip(workers, logprobs, strict=True):
            likely += await asyncio.gather(*(worker.logprob(text[:at], text[at]) for at in range(first, len(text))))
    return [_probed(likely, found) for likely, found in zip(logprobs, answers, strict=True)]


def _probed(logprobs: list[float], answers: list[Answer]) -> Probed:
    further = [
        (answer.last_s - answer.first_s) / (len(answer.tokens) - 1) for answer in answers if len(answer.tokens) > 1
    ]
    return Probed(
        logprobs=logprobs,
        answers=[answer.tokens for answer in answers],
        ttft_s=median(answer.first_s for answer in answers),
        tpot_s=median(further) if further else 0.0,
    )
