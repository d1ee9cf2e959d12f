"""A batch of `bench.batch` as a client has it: what is sent, how far it is, and whether each line was answered once."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import openai

from bench.load import FIRST_TOKEN_ID, LAST_TOKEN_ID
from services.common.models import DEFAULT_MODEL

ENDPOINT: Final = "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")
# While a gateway or Envoy's way to it is gone.
_RETRIES, _TIMEOUT_S = 10, 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of the lines. once: answered exactly once and whole; the others are what is wrong."""

    lines: int
    once: int
    missing: int
    repeated: int
    cut: int
    errors: int

    @property
    def is_right(self) -> bool:
        """Whether all were answered once."""
        return self.once == self.lines


class BatchClient:
    """The official client on one mesh. Its calls block."""

    def __init__(self, port: int) -> None:
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=_RETRIES, timeout=_TIMEOUT_S
        )

    def begin(self, lines: int, prompt_tokens: int, output_tokens: int, rng: random.Random) -> str:
        """The id of a new batch."""
        data = "\n".join(_line(number, prompt_tokens, output_tokens, rng) for number in range(lines))
        file = self._client.files.create(file=("lines.jsonl", data.encode()), purpose="batch")
        return self._client.batches.create(
            input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", metadata={}
        ).id

    def progress(self, batch_id: str) -> tuple[str, int]:
        """Its status, and its lines with an answer."""
        batch = self._client.batches.retrieve(batch_id)
        counts = batch.request_counts
        return batch.status, counts.completed + counts.failed if counts is not None else 0

    def verdict(self, batch_id: str, lines: int, output_tokens: int) -> Verdict:
        """Of one that is over."""
        batch = self._client.batches.retrieve(batch_id)
        results = self._lines(batch.output_file_id)
        seen = Counter(result["custom_id"] for result in results)
        whole = Counter(
            result["custom_id"]
            for result in results
            if result["response"]["body"]["usage"]["completion_tokens"] == output_tokens
        )
        wanted = [_name(number) for number in range(lines)]
        return Verdict(
            lines=lines,
            once=sum(seen[name] == 1 == whole[name] for name in wanted),
            missing=sum(not seen[name] for name in wanted),
            repeated=sum(seen[name] > 1 for name in seen),
            cut=len(results) - whole.total(),
            errors=len(self._lines(batch.error_file_id)),
        )

    def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(line) for line in self._client.files.content(file_id).text.splitlines()]

    def close(self) -> None:
        """Close its connections."""
        self._client.close()


def _name(number: int) -> str:
    return f"line-{number}"


def _line(number: int, prompt_tokens: int, output_tokens: int, rng: random.Random) -> str:
    prompt = [rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(prompt_tokens)]
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
    return json.dumps({"custom_id": _name(number), "method": "POST", "url": ENDPOINT, "body": body})
