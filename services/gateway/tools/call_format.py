"""How calls are written in an answer, one format for each family of models.

The grammar allows the characters of a format and no others between the parts, and the parser relies on it. Where a
format has several texts for a part, models write any of them; the first is the one that prompts have.
"""

from __future__ import annotations

import re
from base64 import b32encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from services.gateway.tools.parameters import parameters_text

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# A letter or digit in the text of a format: of an id, which the model makes up.
ANY = "\x00"
ID_CHARACTERS = 9
_ID = ANY * ID_CHARACTERS
_SHORT_ID = re.compile(rf"[A-Za-z0-9]{{{ID_CHARACTERS}}}")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls are `tag`, `begin`, a call, further ones each behind `between`, and `end`.

    A call is `before_name`, the function's name, `before_arguments`, its arguments as JSON, and `after_arguments`.
    Without an `end` each call has a tag of its own, behind `between`. tag_is_optional: an answer may begin with a call.
    control: those of the texts' parts that may be control tokens of a tokenizer. is_single: one call in an answer, and
    in each message that a template renders. has_short_ids: templates want ids of ID_CHARACTERS letters and digits.
    has_parameters: arguments are not JSON, but parameters (`parameters`).
    """

    name: str
    tag: str
    control: tuple[str, ...]
    before_arguments: str
    after_arguments: tuple[str, ...]
    begin: tuple[str, ...] = ("",)
    before_name: tuple[str, ...] = ("",)
    between: str = ""
    end: str = ""
    tag_is_optional: bool = False
    is_single: bool = False
    has_short_ids: bool = False
    has_parameters: bool = False

    def heads(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """All that may stand between a tag and the first arguments, each with the name in it."""
        return [(begin + head, name) for begin in self.begin for head, name in self.next_heads(names)]

    def next_heads(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """The same for a call that follows another without a tag."""
        return [(before + name + self.before_arguments, name) for before in self.before_name for name in names]

    def tails(self) -> list[tuple[str, bool]]:
        """All that may stand behind arguments, each with whether another call follows without a tag."""
        closed = [(after + self.end, False) for after in self.after_arguments]
        further = [(after + self.between, True) for after in self.after_arguments] if self.end else []
        return closed + further

    def text(self, calls: Sequence[tuple[str, str]], *, after_text: bool = False) -> str:
        """Calls as an answer has them, each a name and arguments as JSON. after_text: there is text before them."""
        if not calls:
            return ""
        tag = "" if self.tag_is_optional and not after_text else self.tag
        before_arguments = self.before_arguments.replace(ANY, "0")
        written = [
            f"{self.before_name[0]}{name}{before_arguments}{self._arguments(arguments)}{self.after_arguments[0]}"
            for name, arguments in calls
        ]
        separator = self.between if self.end else self.between + tag + self.begin[0]
        return tag + self.begin[0] + separator.join(written) + self.end

    def _arguments(self, arguments: str) -> str:
        return parameters_text(arguments) if self.has_parameters else arguments


# Hermes, Qwen 2.5 and Qwen 3; the generic prompt teaches it, too.
HERMES = CallFormat(
    name="hermes",
    tag="<tool_call>",
    control=("<tool_call>", "</tool_call>"),
    before_name=('\n{"name": "',),
    before_arguments='", "arguments": ',
    after_arguments=("}\n</tool_call>",),
    between="\n",
)
# Qwen 3 Coder.
QWEN_CODER = CallFormat(
    name="qwen-coder",
    tag="<tool_call>",
    control=("<tool_call>", "</tool_call>"),
    before_name=("\n<function=",),
    before_arguments=">\n",
    after_arguments=("</function>\n</tool_call>",),
    between="\n",
    has_parameters=True,
)
# Llama 3.1 to 3.3.
LLAMA3 = CallFormat(
    name="llama3",
    tag="<|python_tag|>",
    control=("<|python_tag|>",),
    before_name=('{"name": "', '{"type": "function", "name": "'),
    before_arguments='", "parameters": ',
    after_arguments=("}",),
    tag_is_optional=True,
    is_single=True,
)
# Mistral and Mixtral with tokenizers of versions 2 to 7.
MISTRAL = CallFormat(
    name="mistral",
    tag="[TOOL_CALLS]",
    control=("[TOOL_CALLS]",),
    begin=(" [", "["),
    before_name=('{"name": "',),
    before_arguments='", "arguments": ',
    after_arguments=("}", f', "id": "{_ID}"}}'),
    between=", ",
    end="]",
    has_short_ids=True,
)
# Version 11 of these, and those after it.
MISTRAL_CALL_ID = CallFormat(
    name="mistral-call-id",
    tag="[TOOL_CALLS]",
    control=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    before_arguments=f"[CALL_ID]{_ID}[ARGS]",
    after_arguments=("",),
    has_short_ids=True,
)
MISTRAL_ARGS = CallFormat(
    name="mistral-args",
    tag="[TOOL_CALLS]",
    control=("[TOOL_CALLS]", "[ARGS]"),
    before_arguments="[ARGS]",
    after_arguments=("",),
    has_short_ids=True,
)
# A setting, beside the names of formats: the template is treated as one that knows no tools.
GENERIC = "generic"
FORMATS = {one.name: one for one in (HERMES, QWEN_CODER, LLAMA3, MISTRAL, MISTRAL_CALL_ID, MISTRAL_ARGS)}
# GLM has calls between Hermes' tags, too.
_OF_GLM = "<arg_key>"
# Llama 4 may have calls as Llama 3 has them, and others as Python.
_OF_LLAMA4 = "<|python_start|>"


def short_id(text: str) -> str:
    """An id of ID_CHARACTERS letters and digits that follows from a text: the text itself where it is one."""
    if _SHORT_ID.fullmatch(text):
        return text
    return b32encode(blake2b(text.encode(), digest_size=ID_CHARACTERS).digest()).decode()[:ID_CHARACTERS].lower()


def format_of_template(source: str) -> CallFormat | None:
    """The format of the calls in a chat template; None where there is none that is known."""
    if _OF_LLAMA4 in source:
        return None
    if MISTRAL.tag in source:
        if "[ARGS]" not in source:
            return MISTRAL
        return MISTRAL_CALL_ID if "[CALL_ID]" in source else MISTRAL_ARGS
    if HERMES.tag in source:
        if _OF_GLM in source:
            return None
        return QWEN_CODER if "<function=" in source else HERMES
    # Inside a string of the template a quotation mark may have a backslash.
    if '"parameters": ' in source.replace("\\", "") and "ipython" in source:
        return LLAMA3
    return None
