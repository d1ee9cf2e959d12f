"""OpenAI replies as bytes: server-sent events of a stream, and the one object of an unstreamed answer. Pure.

Everything of an event that does not change is encoded once for a request; a token costs one JSON string and a join.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from kvmesh.v1.common_pb2 import PositionLogprobs, Usage

from services.gateway.api.openai_calls import CallDeltas, message_fields
from services.gateway.api.openai_logprobs import chat_logprobs, completion_logprobs
from services.gateway.api.openai_parse import CHAT, ReplyFormat
from services.gateway.api.openai_prompt_logprobs import PromptLogprobs
from services.gateway.errors import GatewayError, openai_body
from services.gateway.output import Delta, Finish, PromptScores
from services.gateway.request import Plan
from services.gateway.text.text_model import TextModel
from services.gateway.tools.choice_calls import ChoiceCalls

EVENT_STREAM, JSON = "text/event-stream", "application/json"
COMMENT = b": \n\n"
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode


def usage_object(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    cached = usage.cached
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached.local + cached.peer + cached.ram + cached.ssd},
    }


def error_event(error: GatewayError) -> bytes:
    """The last event of a stream that failed."""
    return b"data: " + openai_body(error).encode() + b"\n\n"


class Reply:
    """What every object of one answer shares, and what is known of each choice: where its text has come to, its calls.

    calls: None where tools cannot be called.
    """

    def __init__(self, plan: Plan, reply: ReplyFormat, text: TextModel, *, request_id: str, created_s: int) -> None:
        self.is_chat = reply.endpoint == CHAT
        self.format = reply
        self.echoes = [prompt.echo for prompt in plan.prompts for _ in range(plan.num_choices)]
        self._vocabulary = text.vocabulary_of(plan)
        self._offsets = [0] * len(self.echoes)
        self.prompt_logprobs: PromptLogprobs | None = None
        if reply.prompt_logprobs is not None or reply.echoes_logprobs:
            self.prompt_logprobs = PromptLogprobs(plan, self._vocabulary)
        self.calls: list[CallDeltas] | None = None
        if plan.functions:
            self.calls = [
                CallDeltas(ChoiceCalls(request_id, choice, text.calls.format, plan.functions))
                for choice in range(len(self.echoes))
            ]
        self._identity = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{request_id}",
            "created": created_s,
            "model": plan.name or plan.model,
            "system_fingerprint": f"kvmesh-{plan.model_digest.hex()[:12]}",
        }

    def envelope(self, *, is_chunk: bool) -> dict[str, Any]:
        """The outer fields of an object."""
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.is_chat else "text_completion"
        return {"object": kind, **self._identity}

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """The `logprobs` of a delta's tokens, the stop token aside; None where not asked for."""
        if self.format.logprobs is None:
            return None
        positions: Sequence[PositionLogprobs] = delta.logprobs[:-1] if delta.has_stop_token else delta.logprobs
        if self.is_chat:
            return chat_logprobs(positions, self._vocabulary)
        value, self._offsets[delta.index] = completion_logprobs(positions, self._vocabulary, self._offsets[delta.index])
        return value


class StreamRenderer:
    """Events of a streamed answer."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        envelope = encode(reply.envelope(is_chunk=True))[:-1]
        starts = [envelope + b',"choices":[{"index":%d,' % i for i in range(len(reply.echoes))]
        field = b'"delta":{"content":' if reply.is_chat else b'"text":'
        self._envelope = envelope
        self._prefixes = [b"data: " + start + field for start in starts]
        self._starts = [b"data: " + start for start in starts]
        self._usage = b',"usage":null' if reply.format.include_usage else b""
        close = b"}" if reply.is_chat else b""
        self._end = b"}]" + self._usage + b"}\n\n"
        self._suffix = close + b',"logprobs":null,"finish_reason":null' + self._end
        self._close = close
        self._has_logprobs = reply.format.logprobs is not None

    def opening(self) -> bytes:
        """Sent when a worker has admitted the request: roles of a chat, echoes of a completion, or a comment."""
        reply = self._reply
        if reply.is_chat:
            content = b"null" if reply.calls is not None else b'""'
            body = (
                b'"delta":{"role":"assistant","content":%s},"logprobs":null,"finish_reason":null' % content + self._end
            )
            return b"".join(start + body for start in self._starts)
        echoed = [self._prefixes[i] + encode(echo) + self._suffix for i, echo in enumerate(reply.echoes) if echo]
        return b"".join(echoed) or COMMENT

    def delta(self, delta: Delta) -> bytes:
        """Events of new output; empty while there is nothing to show."""
        if self._reply.calls is not None:
            return self._calls(delta, self._reply.calls[delta.index].push(delta.text))
        if not self._has_logprobs:
            return self._prefixes[delta.index] + encode(delta.text) + self._suffix if delta.text else b""
        logprobs = self._reply.logprobs(delta)
        return b"".join(
            (
                self._prefixes[delta.index], encode(delta.text), self._close, b',"logprobs":', encode(logprobs),
                b',"finish_reason":null', self._end,
            )
        )  # fmt: skip

    def finish(self, finish: Finish) -> bytes:
        """Events of a choice's end."""
        empty = b'"delta":{}' if self._reply.is_chat else b'"text":""'
        held, reason = b"", finish.reason
        if self._reply.calls is not None:
            calls = self._reply.calls[finish.index]
            held = b"".join(self._event(finish.index, change, None) for change in calls.finish())
            reason = calls.finish_reason(reason)
        end = b',"logprobs":null,"finish_reason":"%s"' % reason.encode()
        return held + self._starts[finish.index] + empty + end + self._end

    def _calls(self, delta: Delta, changes: list[dict[str, Any]]) -> bytes:
        """Events of text and calls. The first has the log probabilities, whatever of the tokens' text it shows."""
        logprobs = self._reply.logprobs(delta)
        if not changes:
            return b"" if logprobs is None else self._event(delta.index, {}, logprobs)
        first, *others = changes
        events = [self._event(delta.index, first, logprobs)]
        return b"".join(events + [self._event(delta.index, change, None) for change in others])

    def _event(self, choice: int, change: dict[str, Any], logprobs: dict[str, Any] | None) -> bytes:
        body = b'"delta":%s,"logprobs":%s,"finish_reason":null' % (encode(change), encode(logprobs))
        return self._starts[choice] + body + self._end

    def ending(self, usage: Usage) -> bytes:
        """Usage where asked for, and the end mark."""
        if not self._reply.format.include_usage:
            return DONE
        body = encode(usage_object(usage))
        return b"data: " + self._envelope + b',"choices":[],"usage":' + body + b"}\n\n" + DONE


class WholeRenderer:
    """Collects an unstreamed answer."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._texts: list[list[str]] = [[echo] for echo in reply.echoes]
        self._logprobs: list[dict[str, list[Any]]] = [{} for _ in reply.echoes]
        self._reasons = [""] * len(reply.echoes)
        self._changes: list[list[dict[str, Any]]] = [[] for _ in reply.echoes]

    def delta(self, delta: Delta) -> None:
        """Take new output."""
        if self._reply.calls is not None:
            self._changes[delta.index] += self._reply.calls[delta.index].push(delta.text)
        else:
            self._texts[delta.index].append(delta.text)
        for name, values in (self._reply.logprobs(delta) or {}).items():
            if values is not None:
                self._logprobs[delta.index].setdefault(name, []).extend(values)

    def prompt_scores(self, scores: PromptScores) -> None:
        """Take log probabilities of a prompt."""
        if self._reply.prompt_logprobs is not None:
            self._reply.prompt_logprobs.push(scores)

    @property
    def is_long(self) -> bool:
        """Whether `body` takes long."""
        return self._reply.prompt_logprobs is not None

    def finish(self, finish: Finish) -> None:
        """Take a choice's end."""
        self._reasons[finish.index] = finish.reason
        if self._reply.calls is not None:
            calls = self._reply.calls[finish.index]
            self._changes[finish.index] += calls.finish()
            self._reasons[finish.index] = calls.finish_reason(finish.reason)

    def body(self, usage: Usage) -> bytes:
        """The whole object."""
        choices = [self._choice(i) for i in range(len(self._texts))]
        return encode({**self._reply.envelope(is_chunk=False), "choices": choices, "usage": usage_object(usage)})

    def _choice(self, index: int) -> dict[str, Any]:
        text = "".join(self._texts[index])
        choice: dict[str, Any] = {"index": index, "finish_reason": self._reasons[index], "logprobs": None}
        if self._reply.format.logprobs is not None:
            own = self._logprobs[index] or self._reply.logprobs(Delta(index, "", ())) or {}
            choice["logprobs"] = self._with_echo(index, own)
        if self._reply.prompt_logprobs is not None and self._reply.format.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._reply.prompt_logprobs.by_token(index, self._reply.format.prompt_logprobs)
        if self._reply.calls is not None:
            choice["message"] = {"role": "assistant", "refusal": None, **message_fields(self._changes[index])}
        elif self._reply.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return choice

    def _with_echo(self, index: int, own: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """The arrays of a choice after those of its prompt, where that is echoed."""
        prompts = self._reply.prompt_logprobs
        if prompts is None or not self._reply.format.echoes_logprobs:
            return own
        arrays, offset = prompts.before_echo(index, self._reply.format.logprobs or 0)
        shifted = {**own, "text_offset": [start + offset for start in own["text_offset"]]}
        return {name: values + shifted[name] for name, values in arrays.items()}
