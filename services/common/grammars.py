"""Grammars that an answer has to match, in llguidance's serialisation: how they are written, and what bounds them.

A gateway checks a grammar with the tokenizer and the limits with which a worker follows it, so both come to the same
verdict. The limits count work, not time: a schema that would explode is refused after a fixed amount of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

# JSON that an answer consists of: white space between its parts, so that a model cannot go on with it for ever.
_WHITE_SPACE = r"[ \n\t]{0,24}"
# About 5 ms for the lexer of a grammar, as much for the mask of a token, 40 MB for what masks leave behind.
_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=250_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    # What it would say of its state holds parts of the answer.
    verbose_errors=False,
)
_MAX_DETAIL_CHARACTERS = 300
# What every decoder leaves as it is.
_TAG = re.compile(r"<[!-~]*>")
_NO_ANSWER = "no answer matches it"


class GrammarError(Exception):
    """A grammar that cannot be followed; one line for whoever has written it."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


def json_schema_grammar(schema: Mapping[str, Any], white_space: str | None = None) -> str:
    """Answers are JSON documents of `schema`; white_space: a regular expression of what may stand between their parts.

    Keywords that are not supported are errors when the grammar is compiled, not left out.
    """
    return _serialised(json_schema=_with_options(schema, white_space))


def inline_schema(schema: Mapping[str, Any]) -> str:
    """A JSON document of `schema` as a part of a rule in `lark_grammar`."""
    return f"%json {json.dumps(_with_options(schema, None), separators=(',', ':'), ensure_ascii=False)}"


def _with_options(schema: Mapping[str, Any], white_space: str | None) -> dict[str, Any]:
    options = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_pattern": _WHITE_SPACE if white_space is None else white_space,
        "coerce_one_of": False,
        "lenient": False,
    }
    return {**schema, "x-guidance": options}


def regex_grammar(regex: str) -> str:
    """Answers match a regular expression of Rust's `regex` crate, as a whole."""
    grammar: str = LLMatcher.grammar_from_regex(regex)
    return grammar


def choice_grammar(choices: Sequence[str]) -> str:
    """Answers are one of these texts."""
    return lark_grammar("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_grammar(lark: str) -> str:
    """Answers match a grammar in llguidance's variant of Lark's notation."""
    return _serialised(lark_grammar=lark)


def _serialised(**grammar: Any) -> str:
    return json.dumps({"grammars": [grammar]}, separators=(",", ":"), ensure_ascii=False)


def grammar_tokenizer(tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int) -> LLTokenizer:
    """llguidance's view of a tokenizer. vocab_size: of the model; no grammar allows its rows beyond the tokenizer's."""
    return LLTokenizer(_with_text_as_text(tokenizer), n_vocab=vocab_size, eos_token=list(eos_token_ids))


def _with_text_as_text(tokenizer: Tokenizer) -> str:
    """A serialised tokenizer whose added tokens that are text, such as Qwen's <tool_call>, are in its vocabulary.

    llguidance takes every added token in angle brackets for a control token, which no text of an answer may have.
    """
    added = tokenizer.get_added_tokens_decoder()
    texts = {token.content: i for i, token in added.items() if not token.special and _TAG.fullmatch(token.content)}
    if not texts:
        return tokenizer.to_str()
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] not in texts]
    fields["model"]["vocab"].update(texts)
    return json.dumps(fields, ensure_ascii=False)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of an answer. Leaves the interpreter while it compiles. Raises GrammarError."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    check_matcher(matcher)
    return matcher


def check_matcher(matcher: LLMatcher) -> None:
    """Raise GrammarError where a matcher has given up; it never works again."""
    if matcher.is_error():
        detail = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        raise GrammarError(_NO_ANSWER if detail.startswith("NoExtension") else detail[:_MAX_DETAIL_CHARACTERS])
