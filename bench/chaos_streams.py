"""Clients of `bench.chaos` and others: what each is told, when, and how it differs from another answer.

A client without a key asks again only as long as it was refused before its answer began. One with a key repeats its
request whenever the connection breaks, as clients of a gateway that dies do, and looks that the new answer begins as
the old one did.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_TIMEOUT_S = 180.0
_REPEATS = 20
_REPEAT_PAUSE_S = 0.25
# What of two texts must agree to call one a part of the other.
_ALIKE = 8


class Refused(Exception):
    """The request was answered by an error before its output began. status: of HTTP."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status


@dataclass(slots=True)
class Choice:
    """One of an answer. text: with what is called and how. logprobs: as they came, joined; of embeddings the vector."""

    text: str = ""
    finish: str | None = None
    logprobs: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What one client was told. pause_s: the longest time between two events after the first. job: its number.

    refusals: answers by 429 or 503 before it began. repeats: of a keyed request whose connection broke.
    """

    job: int
    kind: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    output_tokens: int | None = None
    worker: str = ""
    error: str = ""
    done: bool = False
    events: int = 0
    pause_s: float = 0.0
    refusals: int = 0
    repeats: int = 0
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    last_event_s: float = 0.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text if 0 in self.choices else ""


async def ask(
    port: int, path: str, body: Mapping[str, Any], answer: Answer, *, headers: Mapping[str, str] | None = None
) -> Answer:
    """Send a request and read it to the end, into `answer`; what fails is in it. Cancelled, it hangs up."""
    is_keyed = "idempotency-key" in (headers or {})
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            while not answer.done and not answer.error:
                await _ask_once(port, path, body, answer, headers or {}, is_keyed=is_keyed)
    except TimeoutError:
        answer.error = f"no answer within {_TIMEOUT_S:.0f} s"
    answer.ended_s = time.monotonic()
    return answer


async def _ask_once(
    port: int, path: str, body: Mapping[str, Any], answer: Answer, headers: Mapping[str, str], *, is_keyed: bool
) -> None:
    earlier, answer.choices = answer.choices, {}
    try:
        async for name, value in _events(port, path, body, headers):
            if name == "worker":
                answer.worker = value
            else:
                _take(answer, value)
                answer.done |= not body.get("stream") and not answer.error
        if not answer.done and not answer.error:
            raise EOFError("the stream ended early")
        _check_repeat(answer, earlier)
    except Refused as refusal:
        if refusal.status not in (429, 503) or answer.refusals >= _REPEATS * 4:
            answer.error = str(refusal)
            return
        answer.refusals += 1
        answer.choices = earlier
        await asyncio.sleep(_REPEAT_PAUSE_S)
    except (OSError, EOFError) as error:
        if not is_keyed or answer.repeats >= _REPEATS:
            answer.error = f"{type(error).__name__}: {error}"
            return
        answer.repeats += 1
        if sum(len(c.text) for c in earlier.values()) > sum(len(c.text) for c in answer.choices.values()):
            answer.choices = earlier
        await asyncio.sleep(_REPEAT_PAUSE_S)


def _check_repeat(answer: Answer, earlier: Mapping[int, Choice]) -> None:
    for index, choice in earlier.items():
        if not answer.choices.get(index, Choice()).text.startswith(choice.text):
            answer.error = "the repeated answer does not begin as the first did"


def _take(answer: Answer, data: str) -> None:
    now_s = time.monotonic()
    if answer.events:
        answer.pause_s = max(answer.pause_s, now_s - answer.last_event_s)
    answer.last_event_s = now_s
    answer.events += 1
    if data == "[DONE]":
        answer.done = True
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = event["error"]["message"]
        return
    for embedded in event.get("data", ()):
        answer.choices[embedded["index"]] = Choice(logprobs=embedded["embedding"])
    for told in event.get("choices", ()):
        _take_choice(answer.choices.setdefault(told["index"], Choice()), told)
        answer.begun.set()
    if event.get("usage"):
        answer.output_tokens = event["usage"].get("completion_tokens")


def _take_choice(choice: Choice, told: Mapping[str, Any]) -> None:
    message = told.get("delta") or told.get("message") or {}
    choice.text += told.get("text") or message.get("content") or ""
    for call in message.get("tool_calls") or ():
        choice.text += call["function"].get("name", "") + call["function"].get("arguments", "")
    choice.finish = told.get("finish_reason") or choice.finish
    if found := told.get("logprobs"):
        # Of completions they are parallel lists, of chats one list of objects.
        rows = found.get("content") or list(
            zip(found.get("tokens", ()), found.get("token_logprobs", ()), found.get("top_logprobs") or (), strict=False)
        )
        choice.logprobs.extend(rows)


def difference(answer: Answer, expected: Answer) -> str:
    """Empty when equal, else how it differs: the text by duplicate, gap or other, or another part of it by name."""
    if set(answer.choices) != set(expected.choices):
        return "other"
    pairs = [(answer.choices[index], expected.choices[index]) for index in sorted(expected.choices)]
    for one, other in pairs:
        if found := text_difference(one.text, other.text):
            return found
    if any(one.finish != other.finish for one, other in pairs):
        return "finish reason"
    if any(one.logprobs != other.logprobs for one, other in pairs):
        return "logprobs"
    return "" if answer.output_tokens == expected.output_tokens else "usage"


def text_difference(text: str, expected: str) -> str:
    """Empty when equal, else how it differs: the rest repeats what was there, lacks some of it, or is another one."""
    if text == expected:
        return ""
    same = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), len(expected))
    rest = text[same:]
    if len(rest) > _ALIKE and rest[:_ALIKE] in expected[:same]:
        return "duplicate"
    if len(rest) > _ALIKE and rest[:_ALIKE] in expected[same:]:
        return "gap"
    return "other"


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of the values do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


async def _events(
    port: int, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncIterator[tuple[str, str]]:
    """("worker", its name), then ("data", an event or the whole body). Raises Refused, OSError, EOFError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    payload = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: mesh", "connection: close", "content-type: application/json"]
    lines += [f"content-length: {len(payload)}", *(f"{name}: {value}" for name, value in headers.items())]
    try:
        writer.write("\r\n".join((*lines, "", "")).encode() + payload)
        status = await reader.readline()
        if not status:
            raise EOFError("no answer")
        told = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        answered = dict(line.split(": ", 1) for line in told if ": " in line)
        code = int(status.split()[1])
        if code != 200:
            raise Refused(code, (await reader.read()).decode(errors="replace"))
        yield "worker", answered.get("x-kvmesh-worker", "")
        parts = _body(reader, answered)
        if "text/event-stream" not in answered["content-type"]:
            yield "data", b"".join([part async for part in parts]).decode()
            return
        async for line in _lines(parts):
            if line.startswith(b"data: "):
                yield "data", line[6:].decode().strip()
    finally:
        writer.close()


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """As it comes (RFC 9112, section 7.1 where it is chunked). Raises EOFError when it breaks off."""
    if headers.get("transfer-encoding") != "chunked":
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while size := int((await reader.readline()).partition(b";")[0] or b"-1", 16):
        if size < 0:
            raise EOFError("the answer broke off")
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
