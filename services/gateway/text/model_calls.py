"""How a model writes calls: the format, who tells the model of it, and the control tokens in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import structlog
from tokenizers import Tokenizer

from services.gateway.text.tool_prompt import Calls
from services.gateway.text.vocabulary import Vocabulary
from services.gateway.tools.call_format import CallFormat

_log = structlog.get_logger("gateway.text")


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """is_native: the model's own chat template has a place for tools. is_unknown: it has, yet not for calls we know.

    control: those parts of the format's texts that are control tokens, with their ids. vocabulary: the model's, where
    these have text, for answers that may call.
    """

    format: CallFormat
    is_native: bool
    is_unknown: bool
    control: Mapping[str, int]
    vocabulary: Vocabulary


def model_calls(calls: Calls, tokenizer: Tokenizer, vocabulary: Vocabulary) -> ModelCalls:
    """A generic prompt tells of calls in plain text, so there nothing of them is a control token."""
    control = _control_tokens(calls.format, tokenizer, vocabulary) if calls.is_native else {}
    texts = list(vocabulary.token_bytes)
    for token, token_id in control.items():
        texts[token_id] = token.encode()
    shown = replace(vocabulary, token_bytes=texts) if control else vocabulary
    return ModelCalls(calls.format, calls.is_native, calls.is_unknown, control, shown)


def tell_call_formats(models: Mapping[str, ModelCalls]) -> None:
    """Log the format of each model, by its name."""
    for name, calls in models.items():
        told_by = "template" if calls.is_native else "system message"
        if calls.is_unknown:
            detail = f"no known format in the template: {calls.format.name} it is, unless call_formats names another"
            _log.warning("call_format_unknown", model=name, detail=detail)
        else:
            _log.info("call_format", model=name, call_format=calls.format.name, told_by=told_by)


def _control_tokens(call_format: CallFormat, tokenizer: Tokenizer, vocabulary: Vocabulary) -> dict[str, int]:
    ids = {token: tokenizer.token_to_id(token) for token in call_format.control}
    return {token: i for token, i in ids.items() if i is not None and not vocabulary.bytes_of(i)}
