"""The HTTP side of `kvmesh chat`: one streamed chat completion, with the standard library alone."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from services.cli.errors import CliError
from services.common.models import DEFAULT_MODEL

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Where to talk to and how."""

    url: str
    model: str
    api_key: str = ""
    max_tokens: int = 512
    temperature: float | None = None

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Pieces of the answer's text. Raises CliError."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "max_tokens": self.max_tokens,
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        for event in self._events(json.dumps(body).encode()):
            if "error" in event:
                raise CliError(str(event["error"]["message"]))
            for choice in event.get("choices", []):
                if text := choice["delta"].get("content"):
                    yield text

    def _events(self, body: bytes) -> Iterator[dict[str, Any]]:
        with _response(self.url, "/v1/chat/completions", self.api_key, body) as response:
            for line in response:
                data = line.decode().strip()
                if data == "data: [DONE]":
                    return
                if data.startswith("data: "):
                    yield json.loads(data.removeprefix("data: "))


def served_model(url: str, api_key: str) -> str:
    """The default model where it is served, else the first that is. Raises CliError."""
    with _response(url, "/v1/models", api_key) as response:
        try:
            names = [str(model["id"]) for model in json.loads(response.read())["data"]]
        except (ValueError, KeyError, TypeError):
            raise CliError(f"{url}: /v1/models is no list of models") from None
    if not names:
        raise CliError(f"{url} serves no model")
    return DEFAULT_MODEL if DEFAULT_MODEL in names else names[0]


@contextmanager
def _response(url: str, path: str, api_key: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
    """The answer to a POST of `body`, or to a GET. Raises CliError, also for errors while it is read."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        connection.request("GET" if body is None else "POST", f"{parts.path}{path}", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise CliError(_error_message(response.status, response.read()))
        yield response
    except ConnectionRefusedError:
        raise CliError(f"nothing listens on {url}: `kvmesh up` starts a mesh, --url or --state names another") from None
    except (OSError, http.client.HTTPException) as error:
        raise CliError(f"{url}: {error or type(error).__name__}") from None
    finally:
        connection.close()


def _error_message(status: int, body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
