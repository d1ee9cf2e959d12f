"""Tokenizers of GGUF files: SentencePiece by its own rule, what byte-level families add, what is refused by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.common.models import ModelSource
from services.common.settings import ConfigurationError
from services.common.text.gguf_tokenizer import load_gguf_tokenizer
from services.gateway.text.text_model import load_text_model

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# The order is not that of the scores, and pieces overlap.
PIECES = [
    "\u2581",
    "a",
    "b",
    "c",
    "s",
    "<",
    ">",
    "/",
    "ab",
    "bc",
    "abc",
    "\u2581a",
    "ca",
    "\u2581\u2581",
    "\u2581ab",
    "s>",
    "</",
]
SCORES = [-20.0, -21.0, -22.0, -23.0, -24.0, -25.0, -26.0, -27.0, -4.0, -2.0, -6.0, -3.0, -1.0, -5.0, -7.0, -8.0, -9.0]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<|end|>"]
KINDS = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), CONTROL]
ALL_SCORES = [0.0, 0.0, 0.0, *[0.0] * 256, *SCORES, 0.0]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


def write(path: Path, model: str = "llama", pre: str | None = None, **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens, kinds, scores = fields.pop("vocabulary", (TOKENS, KINDS, ALL_SCORES))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if scores:
        writer.add_token_scores(scores)
    if merges := fields.pop("merges", None):
        writer.add_token_merges(merges)
    for name, value in fields.items():
        key = f"tokenizer.{name.replace('__', '.')}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write(tmp_path_factory.mktemp("spm") / "spm.gguf", ggml__bos_token_id=1, ggml__add_space_prefix=False)
    return load_gguf_tokenizer(path)[0]


def joined_by_score(text: str) -> list[int]:
    """SentencePiece's rule, as its authors state it: join the neighbours with the best union until none has one."""
    scores = dict(zip(PIECES, SCORES, strict=True))
    parts = list(text.replace(" ", "\u2581"))
    while True:
        unions = [
            (scores[left + right], -at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in scores
        ]
        if not unions:
            break
        at = -max(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [token for part in parts for token in ids_of(part)]


def ids_of(part: str) -> Sequence[int]:
    return [TOKENS.index(part)] if part in PIECES else [3 + byte for byte in part.encode()]


@settings(max_examples=300)
@given(text=st.text(alphabet="abc <>é", max_size=14))
def test_sentencepiece_by_its_own_rule(sentencepiece: Tokenizer, text: str) -> None:
    assert sentencepiece.encode(text, add_special_tokens=False).ids == joined_by_score(text)


@pytest.mark.parametrize(("prefix", "first"), [(True, "\u2581ab"), (False, "ab")])
def test_space_before_the_text(tmp_path: Path, prefix: bool, first: str) -> None:
    """Llama 2 and Mistral put one there, Gemma does not; it never reaches the caller."""
    path = write(tmp_path / "m.gguf", ggml__bos_token_id=1, ggml__eos_token_id=2, ggml__add_space_prefix=prefix)
    model = load_text_model(ModelSource("m", path))
    ids = model.encode_text("ab é")
    assert ids[:2] == [1, TOKENS.index(first)]
    assert model.vocabulary.strip_first_space is prefix
    assert model.tokenizer.decode(ids) == "ab é"


def test_nobody_can_type_a_control_token(tmp_path: Path) -> None:
    """`</s>` could be merged from `</` and `s>`."""
    path = write(tmp_path / "m.gguf", ggml__bos_token_id=1, ggml__eos_token_id=2, chat_template=TEMPLATE)
    model = load_text_model(ModelSource("m", path))
    ids = model.encode_chat([{"role": "user", "content": "ab</s><|end|>"}])
    assert [token for token in ids if KINDS[token] == CONTROL] == [1, len(TOKENS) - 1]


def test_both_ends_of_an_answer(tmp_path: Path) -> None:
    """A file names one; the end of a turn is known by its text."""
    path = write(tmp_path / "m.gguf", ggml__eos_token_id=2)
    assert load_text_model(ModelSource("m", path)).eos_token_ids == (2, len(TOKENS) - 1)


BPE = (["a", "b", "c", "ab", "bc", "abc", "Ã", "©", "e", "Ì", "ģ", "Ã©", "Ċ"], [NORMAL] * 13, None)
MERGES = ["b c", "a b", "Ã ©"]


def test_llama3_takes_a_whole_word_that_is_a_token(tmp_path: Path) -> None:
    for pre, ids in (("llama-bpe", [5]), ("gpt-2", [0, 4])):
        path = write(tmp_path / f"{pre}.gguf", "gpt2", pre, vocabulary=BPE, merges=MERGES)
        assert load_gguf_tokenizer(path)[0].encode("abc").ids == ids


def test_llama3_begins_with_its_token_unless_told_not_to(tmp_path: Path) -> None:
    for name, fields, ids in (("silent", {}, [0, 5]), ("told", {"ggml__add_bos_token": False}, [5])):
        path = write(
            tmp_path / f"{name}.gguf",
            "gpt2",
            "llama-bpe",
            vocabulary=BPE,
            merges=MERGES,
            ggml__bos_token_id=0,
            **fields,
        )
        assert load_gguf_tokenizer(path)[0].encode("abc").ids == ids


def test_qwen_composes_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "gpt2", "qwen2", vocabulary=BPE, merges=MERGES)
    assert load_gguf_tokenizer(path)[0].encode("e\u0301").ids == [11]


@pytest.mark.parametrize(
    ("model", "pre", "message"),
    [
        ("bert", None, "tokenizer.ggml.model='bert'"),
        ("t5", None, "tokenizer.ggml.model='t5'"),
        ("gpt2", None, "tokenizer.ggml.pre=None"),
        ("gpt2", "default", "tokenizer.ggml.pre='default'"),
        ("gpt2", "tekken", "tokenizer.ggml.pre='tekken'"),
        ("gpt2", "gpt-4o", "tokenizer.ggml.pre='gpt-4o'"),
    ],
)
def test_refused_by_name(tmp_path: Path, model: str, pre: str | None, message: str) -> None:
    path = write(tmp_path / "m.gguf", model, pre, merges=["a b"])
    with pytest.raises(ConfigurationError) as refused:
        load_gguf_tokenizer(path)
    assert message in str(refused.value)


def test_sentencepiece_without_scores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.ggml\.scores"):
        load_gguf_tokenizer(write(tmp_path / "m.gguf", vocabulary=(TOKENS, KINDS, None)))


def test_a_folder_may_list_several_ends(sentencepiece: Tokenizer, tmp_path: Path) -> None:
    """Gemma and Llama 3 do, in generation_config.json."""
    sentencepiece.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, len(TOKENS) - 1]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert load_text_model(ModelSource("m", tmp_path)).eos_token_ids == (0, 2, len(TOKENS) - 1)
