"""What a client wants and what will be run: plain data between the two APIs and the core.

Both APIs translate into a GenerationRequest; `planning` turns it into a Plan (tokens, block ids, limits checked).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from kvmesh.v1.common_pb2 import PriorityClass

from services.gateway.adapters import AdapterView
from services.gateway.errors import InvalidRequest

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_PROMPTS = 128
MAX_INPUTS = 2048
MAX_LOGPROBS = 20
# Of all prompts, and told with each choice; together some megabytes of an answer.
MAX_PROMPT_LOGPROBS = 131_072
MAX_LOGIT_BIAS = 1024
MAX_OBJECTIVE_S = 86_400.0
_U64 = 2**64


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Fields and meaning of proto SamplingParams; None: left out, and the model's default in a plan.

    seed None: a fresh one is drawn at admission. num_logprobs, num_prompt_logprobs None: none wanted.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: str = ""


class AnswerForm(msgspec.Struct, frozen=True):
    """What an answer has to match. field: of the request, for messages. parts: one of them tells what is wrong."""

    grammar: str
    field: str
    parts: tuple[AnswerForm, ...] = ()


class Function(msgspec.Struct, frozen=True):
    """A function that may be called. parameters: the schema of its arguments, an object's. field: for messages."""

    name: str
    parameters: Mapping[str, Any]
    field: str


class ToolUse(msgspec.Struct, frozen=True):
    """functions: those that may be called. must_call: no answer without a call. most_calls: in one answer."""

    functions: Sequence[Function]
    must_call: bool
    most_calls: int

    @property
    def field(self) -> str:
        """Of the request, for messages."""
        return "tools"


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One client request. Either `chat` (one prompt) or `prompts`, each a text or token ids.

    ttft_s, tpot_s: its objectives, 0 for none of its own. form: of every answer, or what that may call; its grammar is
    not in `sampling` yet.
    A message has the texts role and content, and may have name, tool_call_id and tool_calls, the latter as OpenAI's
    API has them. tools: what the model is told of them, in that API's form too. embeds: embeddings of the prompts are
    wanted, and no answers.
    """

    model: str
    prompts: list[str | list[int]] = []
    chat: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    sampling: Sampling = Sampling()
    num_choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    priority: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    echo: bool = False
    form: AnswerForm | ToolUse | None = None
    embeds: bool = False

    @property
    def field(self) -> str:
        """Where the client has put the prompts, for messages."""
        return "messages" if self.chat is not None else "input" if self.embeds else "prompt"


class PromptPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, ready for a worker. echo: its text where the answer repeats it.

    message: a serialized WorkerGenerateRequest of prompt_token_ids and prompt_block_ids alone. A helper process makes
    it; reading it here is one pass in C, where a list of a megabyte's tokens would hold up the event loop.
    """

    message: bytes
    num_tokens: int
    block_ids: bytes
    max_tokens: int
    echo: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request. stop_token_ids holds the end-of-sequence tokens unless they are to be ignored.

    form: its grammar is still to be compiled, for a model of vocab_size tokens. functions: names of those that
    answers may call, each with the names of its arguments that are text. pooling: all embeddings are made by it;
    empty: by whatever a worker has.
    """

    model: str
    model_digest: bytes
    block_root: bytes
    block_tokens: int
    prompts: list[PromptPlan]
    sampling: Sampling
    num_choices: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    priority: int
    ttft_s: float
    tpot_s: float
    form: AnswerForm | None = None
    functions: dict[str, frozenset[str]] = {}
    vocab_size: int = 0
    # As the request named its model.
    name: str = ""
    adapter: AdapterView | None = None
    embeds: bool = False
    pooling: str = ""

    @property
    def made_with(self) -> bytes:
        """Digests of all weights that the answer depends on."""
        return self.model_digest + (self.adapter.digest if self.adapter is not None else b"")

    @property
    def most_output_tokens(self) -> int:
        """Of all choices of all prompts."""
        return sum(prompt.max_tokens for prompt in self.prompts) * self.num_choices

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(prompt.num_tokens for prompt in self.prompts)


def check_request(request: GenerationRequest) -> None:
    """Raise InvalidRequest naming the first field that is out of range."""
    if not request.model:
        raise InvalidRequest("model must be given", "model")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {request.max_tokens}", "max_tokens")
    if not 1 <= request.num_choices <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}, not {request.num_choices}", "n")
    if request.priority not in PriorityClass.values():
        raise InvalidRequest(f"priority {request.priority} is none of the classes", "priority")
    _check_range("kvmesh.ttft_s", request.ttft_s, 0.0, MAX_OBJECTIVE_S)
    _check_range("kvmesh.tpot_s", request.tpot_s, 0.0, MAX_OBJECTIVE_S)
    _check_prompts(request)
    _check_stops(request)
    if request.form is not None and request.ignore_eos:
        raise InvalidRequest(f"ignore_eos cannot go with {request.form.field}, whose answers end", "ignore_eos")
    check_sampling(request.sampling)


def _check_prompts(request: GenerationRequest) -> None:
    if request.chat is not None:
        if not request.chat:
            raise InvalidRequest("messages must not be empty", "messages")
        return
    field, most = request.field, MAX_INPUTS if request.embeds else MAX_PROMPTS
    if not request.prompts:
        raise InvalidRequest(f"{field} must not be empty", field)
    if len(request.prompts) > most:
        raise InvalidRequest(f"at most {most} prompts, not {len(request.prompts)}", field)
    if any(len(prompt) == 0 for prompt in request.prompts):
        raise InvalidRequest(f"{field} must not be empty", field)


def _check_stops(request: GenerationRequest) -> None:
    if len(request.stop) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings, not {len(request.stop)}", "stop")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in request.stop):
        raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    if len(request.stop_token_ids) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"at most {MAX_LOGIT_BIAS} stop tokens", "stop_token_ids")


def check_sampling(sampling: Sampling) -> None:
    """Raise InvalidRequest naming the first field that is out of range."""
    _check_range("temperature", sampling.temperature, 0.0, 2.0)
    _check_range("top_p", sampling.top_p, 0.0, 1.0, above=True)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.0, 2.0, above=True)
    _check_range("top_k", sampling.top_k, 0, 2**32 - 1)
    if sampling.seed is not None and not 0 <= sampling.seed < _U64:
        raise InvalidRequest("seed must be a 64-bit number", "seed")
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has more than {MAX_LOGIT_BIAS} entries", "logit_bias")
    for bias in sampling.logit_bias.values():
        _check_range("logit_bias", bias, -100.0, 100.0)
    _check_range("logprobs", sampling.num_logprobs, 0, MAX_LOGPROBS)
    _check_range("prompt_logprobs", sampling.num_prompt_logprobs, 0, MAX_LOGPROBS)


def _check_range(name: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    if value is None:
        return
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        border = "greater than" if above else "at least"
        raise InvalidRequest(f"{name} must be {border} {low} and at most {high}, not {value}", name)
