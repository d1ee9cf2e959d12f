"""The Inference servicer: the native API onto the core."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from kvmesh.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_TOOL_CALLS,
    PromptLogprobs,
)
from kvmesh.v1.inference_pb2 import AnswerForm as AnswerFormMessage
from kvmesh.v1.inference_pb2 import (
    ChoiceFinish,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateAccepted,
    GenerateCompleted,
    GenerateDelta,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from kvmesh.v1.inference_pb2_grpc import InferenceServicer

from services.gateway.api.edge import Context, abort, as_gateway_error, metadata_of, on_end, send_headers
from services.gateway.api.native_tools import call_deltas, chat_messages, told_tools, tool_offer
from services.gateway.beginning import Begun
from services.gateway.core import Core, check_request_id
from services.gateway.errors import InvalidRequest
from services.gateway.grammars.formats import choice_form, grammar_form, json_form, object_form, regex_form
from services.gateway.output import LENGTH, Accepted, Delta, Event, Finish, PromptScores
from services.gateway.request import AnswerForm, GenerationRequest, Sampling
from services.gateway.session import OK, Session
from services.gateway.text.detokenizer import decode_all
from services.gateway.text.pool import helper
from services.gateway.text.vocabulary import Vocabulary
from services.gateway.tools.choice_calls import TOOL_CALLS, ChoiceCalls
from services.gateway.tools.offered import ToolOffer

# More are turned into text in a helper process, so that the streams of others go on.
_INLINE_TOKENS = 4096
_OPTIONAL_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "num_logprobs", "num_prompt_logprobs",
)  # fmt: skip


class InferenceService(InferenceServicer):
    """Translates between the native messages and the core."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateResponse]:
        """See the proto."""
        session: Session | None = None
        try:
            session = self._core.open("generate", metadata_of(context), context.time_remaining(), request.request_id)
            on_end(context, session)
            check_request_id(request.request_id)
            begun = await self._core.beginner.begin_native(session, generation_request(request), tool_offer(request))
            generation, events = begun.generation, begun.events
            with_text = request.return_text if request.HasField("return_text") else True
            calls = self._calls(session, begun)
            is_open = False
            while events:
                for event in events:
                    if isinstance(event, Accepted):
                        if is_open:
                            continue
                        is_open = True
                        await send_headers(context, session, event.worker_id, event.cached_tokens)
                        yield _accepted(event, session, begun.plan.prompt_tokens)
                    else:
                        session.output_seen()
                        for message in _messages(event, with_text, calls):
                            yield message
                events = await generation.read()
            yield GenerateResponse(completed=GenerateCompleted(usage=generation.usage()))
            session.close(OK)
        except Exception as error:
            known = as_gateway_error(error)
            if session is not None:
                session.fail(known)
            await abort(context, known, session)

    def _calls(self, session: Session, begun: Begun) -> list[ChoiceCalls]:
        """Of each choice; none where no function may be called."""
        names = begun.plan.functions
        if not names:
            return []
        known = self._core.catalog.texts[begun.plan.model].calls.format
        return [ChoiceCalls(session.answer_id, choice, known, names) for choice in range(begun.plan.num_choices)]

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        """See the proto."""
        try:
            with self._core.place("tokenize", metadata_of(context)):
                model = self._core.catalog.resolve(request.model)
                self._core.catalog.text_model(model)
                chat = chat_messages(request.chat) if request.HasField("chat") else None
                if chat == [] or (chat is None and not request.HasField("text")):
                    raise InvalidRequest("text or chat must be given", "prompt")
                base, offer = self._core.catalog.base(model), told_tools(request)
                encoded: bytes = await self._core.pool.call(_tokenize, base, request.text, chat, offer)
                return TokenizeResponse.FromString(encoded)
        except Exception as error:
            await abort(context, as_gateway_error(error))

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        """See the proto."""
        try:
            with self._core.place("detokenize", metadata_of(context)):
                request.model = self._core.catalog.resolve(request.model)
                vocabulary = self._core.catalog.text_model(request.model).vocabulary
                if len(request.token_ids) <= _INLINE_TOKENS:
                    return DetokenizeResponse(text=_detokenized(vocabulary, request))
                request.model = self._core.catalog.base(request.model)
                encoded: bytes = await self._core.pool.call(_detokenize, request.SerializeToString())
                return DetokenizeResponse.FromString(encoded)
        except Exception as error:
            await abort(context, as_gateway_error(error))

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        """See the proto."""
        try:
            self._core.tenant(metadata_of(context))
            return ListModelsResponse(models=self._core.listing.infos())
        except Exception as error:
            await abort(context, as_gateway_error(error))


def generation_request(request: GenerateRequest) -> GenerationRequest:
    """The domain request of a native one, but for its tools. Raises InvalidRequest when there is no prompt."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("a prompt must be given", "prompt")
    prompts: list[str | list[int]] = []
    if kind != "chat":
        prompts = [request.text if kind == "text" else list(request.token_ids.ids)]
    given = {name: getattr(request, name) for name in _OPTIONAL_SAMPLING if request.HasField(name)}  # type: ignore[arg-type]
    return GenerationRequest(
        model=request.model,
        prompts=prompts,
        chat=chat_messages(request.chat) if kind == "chat" else None,
        sampling=Sampling(**given, logit_bias=dict(request.logit_bias)),
        num_choices=request.num_choices if request.HasField("num_choices") else 1,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        cache_salt=request.cache_salt,
        priority=int(request.priority),
        ttft_s=request.objectives.ttft_s,
        tpot_s=request.objectives.tpot_s,
        form=_form(request.form) if request.HasField("form") else None,
    )


def _form(form: AnswerFormMessage) -> AnswerForm:
    kind = form.WhichOneof("kind")
    match kind:
        case "json_schema":
            return json_form("form.json_schema", form.json_schema)
        case "regex":
            return regex_form("form.regex", form.regex)
        case "choices":
            return choice_form("form.choices", list(form.choices.texts))
        case "grammar":
            return grammar_form("form.grammar", form.grammar)
        case "json_object" if form.json_object:
            return object_form("form.json_object")
    raise InvalidRequest("form: one of its kinds must be given", "form")


def _accepted(event: Accepted, session: Session, prompt_tokens: int) -> GenerateResponse:
    return GenerateResponse(
        accepted=GenerateAccepted(
            request_id=session.request_id,
            worker_id=event.worker_id,
            cached_tokens=event.cached_tokens,
            prompt_tokens=prompt_tokens,
        )
    )


def _messages(event: Event, with_text: bool, calls: Sequence[ChoiceCalls]) -> Iterator[GenerateResponse]:
    """calls: of each choice, none where no function may be called."""
    if isinstance(event, PromptScores):
        yield GenerateResponse(prompt_logprobs=PromptLogprobs(first=event.first, logprobs=event.positions))
    elif calls and isinstance(event, Delta | Finish):
        yield from _with_calls(event, calls[event.index])
    elif isinstance(event, Delta):
        text = event.text if with_text else ""
        delta = GenerateDelta(choice=event.index, token_ids=event.token_ids, text=text, logprobs=event.logprobs)
        yield GenerateResponse(delta=delta)
    else:
        assert isinstance(event, Finish)
        yield _finish(event, event.reason)


def _with_calls(event: Delta | Finish, calls: ChoiceCalls) -> Iterator[GenerateResponse]:
    if isinstance(event, Delta):
        found = call_deltas(event, calls.push(event.text), calls)
    else:
        found = call_deltas(Delta(event.index, "", ()), calls.finish(), calls)
    for delta in found:
        yield GenerateResponse(delta=delta)
    if isinstance(event, Finish):
        yield _finish(event, calls.finish_reason(event.reason))


def _finish(event: Finish, reason: str) -> GenerateResponse:
    number = {LENGTH: FINISH_REASON_LENGTH, TOOL_CALLS: FINISH_REASON_TOOL_CALLS}.get(reason, FINISH_REASON_STOP)
    return GenerateResponse(finish=ChoiceFinish(choice=event.index, reason=number, stop_string=event.stop_string))


def _detokenized(vocabulary: Vocabulary, request: DetokenizeRequest) -> str:
    size = len(vocabulary.token_bytes)
    if any(token >= size for token in request.token_ids):
        raise InvalidRequest(f"a token id is outside the vocabulary of {size}", "token_ids")
    return decode_all(vocabulary, request.token_ids)


def _detokenize(encoded: bytes) -> bytes:
    """Runs in a helper process; from a serialized DetokenizeRequest to its response."""
    request = DetokenizeRequest.FromString(encoded)
    text = _detokenized(helper().texts[request.model].vocabulary, request)
    return DetokenizeResponse(text=text).SerializeToString()


def _tokenize(model: str, text: str, chat: list[dict[str, Any]] | None, offer: ToolOffer | None) -> bytes:
    """Runs in a helper process; the serialized TokenizeResponse."""
    known = helper().texts[model]
    tools = offer.told() if offer is not None else []
    ids = known.encode_chat(chat, tools) if chat is not None else known.encode_text(text)
    return TokenizeResponse(token_ids=ids).SerializeToString()
