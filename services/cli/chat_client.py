"""The HTTP side of `kvmesh chat`: one streamed chat completion, with the standard library alone."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from services.cli.errors import CliError

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Where to talk to and how."""

    url: str
    model: str
    api_key: str = ""
    max_tokens: int = 512
    temperature: float = 0.7

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Pieces of the answer's text. Raises CliError."""
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        for event in self._events(json.dumps(body).encode()):
            if "error" in event:
                raise CliError(str(event["error"]["message"]))
            for choice in event.get("choices", []):
                if text := choice["delta"].get("content"):
                    yield text

    def _events(self, body: bytes) -> Iterator[dict[str, Any]]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request("POST", f"{parts.path}/v1/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise CliError(_error_message(response.status, response.read()))
            for line in response:
                data = line.decode().strip()
                if data == "data: [DONE]":
                    return
                if data.startswith("data: "):
                    yield json.loads(data.removeprefix("data: "))
        except (OSError, http.client.HTTPException) as error:
            raise CliError(f"{self.url}: {error or type(error).__name__}") from None
        finally:
            connection.close()


def _error_message(status: int, body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
