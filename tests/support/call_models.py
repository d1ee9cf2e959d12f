"""Text sides of models whose templates and control tokens are a family's: the default model's tokens, renamed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from services.common.grammars import grammar_tokenizer
from services.common.models import ModelSource, resolve_model
from services.common.text.model_tokenizer import load_tokenizer
from services.gateway.text.text_model import TextModel, load_text_model

LLAMA3_TEMPLATE = """\
{%- if not tools is defined %}{% set tools = none %}{% endif -%}
{%- if tools %}<|im_start|>system
Environment: ipython
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}<|im_end|>{% endif -%}
{%- for m in messages -%}
{%- if 'tool_calls' in m -%}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif -%}
<|im_start|>assistant
{{ '{"name": "' + m.tool_calls[0].function.name + '", ' }}{{ '"parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}<|im_end|>' }}
{%- elif m.role == 'tool' -%}
<|im_start|>ipython
{{ m.content | tojson }}<|im_end|>
{%- else -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
_MISTRAL = """\
{%%- if tools %%}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{%% endif -%%}
{%%- for m in messages -%%}
{%%- if m.tool_calls is defined -%%}
%s
{%%- elif m.role == 'tool' -%%}
{%%- if m.tool_call_id | length != 9 %%}{{ raise_exception("ids have 9 letters and digits") }}{%% endif -%%}
[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%%- elif m.role == 'user' -%%}
[INST] {{ m.content }}[/INST]
{%%- else -%%}
{{ m.content }}
{%%- endif -%%}
{%%- endfor -%%}
"""
MISTRAL_TEMPLATE = _MISTRAL % (
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}{{ ', \"id\": \"' + c.id + '\"}' }}"
    "{{ ', ' if not loop.last }}{% endfor %}]<|im_end|>"
)
MISTRAL_ARGS_TEMPLATE = _MISTRAL % (
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
)
MISTRAL_CALL_ID_TEMPLATE = _MISTRAL % (
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)
HERMES_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>{% endfor -%}
"""
QWEN_CODER_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
<function={{ c.function.name }}>
{% for name, value in c.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>{% endfor -%}
"""
TEMPLATES = {
    "hermes": HERMES_TEMPLATE,
    "qwen-coder": QWEN_CODER_TEMPLATE,
    "llama3": LLAMA3_TEMPLATE,
    "mistral": MISTRAL_TEMPLATE,
    "mistral-args": MISTRAL_ARGS_TEMPLATE,
    "mistral-call-id": MISTRAL_CALL_ID_TEMPLATE,
}
CONTROL = (
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<tool_call>", "</tool_call>", "[INST]", "[/INST]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
_DEFAULT = "smollm2-135m"


@cache
def _tokenizer_files() -> tuple[str, str]:
    """config.json and tokenizer.json."""
    loaded = load_tokenizer(resolve_model(_DEFAULT))
    fields = json.loads(loaded.tokenizer.to_str())
    vocab = fields["model"]["vocab"]
    free = [token for token in fields["added_tokens"] if token["id"] not in (*loaded.eos_token_ids, 1)]
    for token, name in zip(free, CONTROL, strict=False):
        vocab[name] = vocab.pop(token["content"])
        token["content"] = name
    return json.dumps({"eos_token_id": list(loaded.eos_token_ids)}), json.dumps(fields)


@cache
def family_grammars() -> LLTokenizer:
    """The tokenizer of all these models, for grammars."""
    config, tokenizer = _tokenizer_files()
    return grammar_tokenizer(Tokenizer.from_str(tokenizer), json.loads(config)["eos_token_id"], 49152)


def family_folder(folder: Path, template: str) -> Path:
    """An artifact without weights: the default model's tokenizer, of which CONTROL are control tokens."""
    config, tokenizer = _tokenizer_files()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def family_model(folder: Path, template: str, call_format: str | None = None) -> TextModel:
    """The text side of such an artifact, under the default model's name."""
    return load_text_model(ModelSource(_DEFAULT, family_folder(folder, template)), call_format)
