"""The same prompts one by one and sixteen at once over HTTP: how many texts differ. For any OpenAI server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.request import Request, urlopen

_TIMEOUT_S = 300.0
_WORDS = ("river", "stone", "garden", "light", "window", "paper", "music", "winter", "horse", "bread", "answer", "road")


def prompts(count: int) -> list[str]:
    """Texts of some 40 to 150 words."""
    rng = random.Random(3)
    return [f"{number}. " + " ".join(rng.choices(_WORDS, k=40 + 7 * number)) for number in range(count)]


async def different_texts(url: str, model: str, output: int, sampling: Mapping[str, Any], count: int) -> int:
    """How many of `count` texts at once are others than alone. Raises OSError."""
    texts = prompts(count)
    alone = [await _complete(url, model, text, output, sampling) for text in texts]
    together = await asyncio.gather(*(_complete(url, model, text, output, sampling) for text in texts))
    return _different(alone, together)


def _different(first: Sequence[str], second: Sequence[str]) -> int:
    return sum(one != other for one, other in zip(first, second, strict=True))


async def _complete(url: str, model: str, prompt: str, output: int, sampling: Mapping[str, Any]) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": output, "ignore_eos": True, **sampling}

    def send() -> str:
        request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            text: str = json.load(response)["choices"][0]["text"]
            return text

    return await asyncio.to_thread(send)
