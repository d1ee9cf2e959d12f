"""Everything of a model that the gateway needs: tokenizer, vocabulary, chat template, end-of-sequence tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from services.common.models import ModelSource
from services.common.text.model_tokenizer import load_tokenizer
from services.common.tokenizer_digest import tokenizer_digest
from services.gateway.errors import InvalidRequest
from services.gateway.request import Plan, Sampling
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_calls import ModelCalls, model_calls
from services.gateway.text.sampling_defaults import folder_defaults, gguf_defaults
from services.gateway.text.tool_prompt import Calls
from services.gateway.text.vocabulary import Vocabulary, build_vocabulary
from services.gateway.tools.call_format import HERMES


@dataclass(frozen=True, slots=True)
class TextModel:
    """One model's text side.

    digest: compared with what its workers report. tool_template: of chats with tools, or with calls and results.
    """

    name: str
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    chat_template: ChatTemplate | None
    tool_template: ChatTemplate | None
    calls: ModelCalls
    eos_token_ids: tuple[int, ...]
    digest: bytes
    longest_token_bytes: int
    sampling_defaults: Sampling

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a raw prompt: special tokens in it count, and the tokenizer's own (such as BOS) are added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Tokens of a templated chat. Only the template's own special tokens count. Raises InvalidRequest."""
        about_calls = tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        template = self.tool_template if about_calls else self.chat_template
        if template is None:
            raise InvalidRequest(f"the model {self.name} has no chat template; use completions", "messages")
        token_ids: list[int] = []
        self.tokenizer.encode_special_tokens = True
        try:
            for piece, is_special in template.render(messages, tools).pieces():
                if is_special:
                    token_id = self.tokenizer.token_to_id(piece)
                    assert token_id is not None
                    token_ids.append(token_id)
                else:
                    token_ids += self.tokenizer.encode(piece, add_special_tokens=False).ids
        finally:
            self.tokenizer.encode_special_tokens = False
        return token_ids

    def vocabulary_of(self, plan: Plan) -> Vocabulary:
        """The vocabulary of its answers' text."""
        return self.calls.vocabulary if plan.functions else self.vocabulary

    def least_tokens(self, num_bytes: int) -> int:
        """A lower bound on the tokens of a text of `num_bytes`, known without tokenising it."""
        return num_bytes // self.longest_token_bytes


def load_text_model(source: ModelSource, call_format: str | None = None) -> TextModel:
    """Read the text side of an artifact. call_format: of its calls, as it is set; None: what its template has.

    Raises ConfigurationError naming what is missing or not supported.
    """
    loaded = load_tokenizer(source)
    tokenizer = loaded.tokenizer
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    vocabulary = build_vocabulary(tokenizer)
    template, own_tool_template = (
        ChatTemplate(
            source_text,
            special_tokens=special,
            variables=loaded.variables,
            call_format=call_format,
            is_for_tools=is_for_tools,
        )
        if source_text
        else None
        for source_text, is_for_tools in ((loaded.template, False), (loaded.tool_template, True))
    )
    # One for tools takes them for granted, so it renders no chat whose functions stand in the system message.
    has_own = own_tool_template is not None and own_tool_template.calls.is_native
    tool_template = own_tool_template if has_own else template
    return TextModel(
        name=source.name,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        chat_template=template,
        tool_template=tool_template,
        calls=model_calls(_calls(tool_template, own_tool_template), tokenizer, vocabulary),
        eos_token_ids=loaded.eos_token_ids,
        digest=tokenizer_digest(source),
        longest_token_bytes=max([len(token) for token in vocabulary.token_bytes] + [len(t.encode()) for t in special]),
        sampling_defaults=(
            gguf_defaults(source.name, loaded.sampling) if source.is_gguf else folder_defaults(loaded.sampling)
        ),
    )


def _calls(template: ChatTemplate | None, own: ChatTemplate | None) -> Calls:
    """template: of chats with tools. own: the model's template for tools alone, even where it is not that."""
    calls = template.calls if template is not None else Calls(HERMES, is_native=False)
    is_unknown = calls.is_unknown or (own is not None and own.calls.is_unknown and not calls.is_native)
    return replace(calls, is_unknown=is_unknown)


def load_text_models(sources: Iterable[ModelSource], call_formats: Mapping[str, str]) -> dict[str, TextModel]:
    """All by name. call_formats: of those whose format is set. Raises ConfigurationError."""
    return {source.name: load_text_model(source, call_formats.get(source.name)) for source in sources}
