"""Greedy completions of long prompts over HTTP, for tests of what of them was cached."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

from tests.support.mesh import MODEL


@dataclass(frozen=True)
class Completion:
    """What a client got of one request."""

    text: str
    cached_tokens: int
    prompt_tokens: int
    seconds: float


def long_prompt(number: int, words: int) -> str:
    """Words whose order depends on `number`, so that prompts of different numbers share no block."""
    return " ".join(f"word{(number * 7919 + i * 31) % 997}" for i in range(words))


def complete(
    url: str, number: int, words: int, max_tokens: int, *, api_key: str = "", timeout_s: float = 120, **fields: Any
) -> Completion:
    """The completion of a long prompt by the mesh at `url`; `fields` are further ones of the request."""
    body = {"model": MODEL, "prompt": long_prompt(number, words), "max_tokens": max_tokens, "temperature": 0, **fields}
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    started_s = time.monotonic()
    with urlopen(Request(f"{url}/v1/completions", json.dumps(body).encode(), headers), timeout=timeout_s) as response:
        answer = json.loads(response.read())
    usage = answer["usage"]
    return Completion(
        answer["choices"][0]["text"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens"],
        time.monotonic() - started_s,
    )
