"""Small parts: errors, keys, admission, output, pulse, settings, planning."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest

from services.common.bearer_keys import hash_key, new_key
from services.common.blocks import block_root, cache_namespace, chain_block_ids, join_ids
from services.common.settings import ConfigurationError, load_settings
from services.gateway import errors
from services.gateway.admission import Admission
from services.gateway.config import GatewaySettings
from services.gateway.errors import (
    AuthenticationFailed,
    ContextLengthExceeded,
    GatewayError,
    Overloaded,
    TenantLimitExceeded,
    openai_body,
    shape_of,
    trailing_metadata,
)
from services.gateway.generation import Generation
from services.gateway.keys import KeyRing, parse_keys
from services.gateway.new_key import main as new_key_main
from services.gateway.output import ChoiceOutput, Delta, Finish
from services.gateway.planning import ModelView, Tenant, make_plan
from services.gateway.pulse import Pulse
from services.gateway.request import GenerationRequest
from services.gateway.text.stop_strings import StopStrings
from services.gateway.text.text_model import TextModel
from tests.support.waiting import eventually

ALL_ERRORS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, GatewayError) and cls is not GatewayError
]


@pytest.mark.parametrize("cls", ALL_ERRORS)
def test_every_error_has_its_shape(cls: type[GatewayError]) -> None:
    error = pickle.loads(pickle.dumps(cls("größe " * 1000, "p", 0.2)))
    shape = shape_of(error)
    body = json.loads(openai_body(error))["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert openai_body(error).isascii()
    assert len(openai_body(error)) < 8000
    metadata = dict(trailing_metadata(error))
    assert ("retry-after" in metadata) == (shape.http_status in (429, 503))
    assert int(metadata.get("retry-after", "1")) >= 1


def write_keys(path: Path, *lines: str) -> None:
    path.write_text("\n".join(lines))
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000 + len(lines)))


def test_keys_map_to_tenants_and_reload(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first, second = new_key("kvm"), new_key("kvm")
    write_keys(path, "# keys", "", f"{hash_key(first)} acme 3")
    ring = KeyRing(path)
    assert ring.tenant_of(f"Bearer {first}", 0.0) == Tenant("acme", 3)
    for wrong in ("", "Bearer", f"Bearer {second}", f"Basic {first}", first):
        with pytest.raises(AuthenticationFailed):
            ring.tenant_of(wrong, 0.0)
    blake = hashlib.blake2b(second.encode(), digest_size=32).hexdigest()
    write_keys(path, f"blake2b:{blake} beta", "# longer than before")
    assert ring.tenant_of(f"bearer {second}", 10.0) == Tenant("beta")
    with pytest.raises(AuthenticationFailed):
        ring.tenant_of(f"Bearer {first}", 10.0)
    write_keys(path, "broken", "lines", "here")
    assert ring.tenant_of(f"Bearer {second}", 20.0) == Tenant("beta")
    path.unlink()
    assert ring.tenant_of(f"Bearer {second}", 30.0) == Tenant("beta")


def test_keys_file_errors_name_the_line_and_no_content(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="line 2") as caught:
        parse_keys("\nplain-secret tenant")
    assert "plain-secret" not in str(caught.value)
    line = hash_key("k")
    assert parse_keys(f"{line} one\n{line} one\n") == {line: Tenant("one")}
    for other in ("two", "one 1"):
        with pytest.raises(ConfigurationError, match="line 2"):
            parse_keys(f"{line} one\n{line} {other}\n")
    with pytest.raises(ConfigurationError):
        KeyRing(tmp_path / "missing")
    assert KeyRing(None).tenant_of("", 0.0) == Tenant("default")


def test_a_new_key_is_of_the_tenant_it_was_made_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new_key_main(["acme", "2"]) == 0
    made = capsys.readouterr()
    (tmp_path / "keys").write_text(made.out)
    assert made.err.strip() not in made.out
    assert KeyRing(tmp_path / "keys").tenant_of(f"Bearer {made.err.strip()}", 0.0) == Tenant("acme", 2)
    assert new_key_main(["two words"]) == 2
    assert new_key_main([]) == 2


def test_admission_counts() -> None:
    admission = Admission(max_total=3, max_tenant=2)
    admission.enter("a")
    admission.enter("a")
    with pytest.raises(TenantLimitExceeded):
        admission.enter("a")
    admission.enter("b")
    with pytest.raises(Overloaded):
        admission.enter("c")
    for tenant in ("a", "b", "a"):
        admission.leave(tenant)
    assert (admission.total, admission.statistics()) == (0, {})


def test_choice_output_finishes_once(text_model: TextModel) -> None:
    tokens = text_model.encode_text("one two three")
    choice = ChoiceOutput(0, text_model.vocabulary, StopStrings(("two",)), frozenset({2}))
    events = [*choice.push(tokens, ()), *choice.push(tokens, ()), *choice.end("length")]
    assert events == [Delta(0, "one ", tokens[:2]), Finish(0, "stop", "two")]
    ended = ChoiceOutput(1, text_model.vocabulary, StopStrings(("threex",)), frozenset({2}))
    events = [*ended.push([*tokens, 2], ()), *ended.end("stop"), *ended.end("stop")]
    assert events == [
        Delta(1, "one two ", [*tokens, 2], (), True),
        Delta(1, "three", ()),
        Finish(1, "stop"),
    ]
    assert ended.num_tokens == len(tokens) + 1


def a_view(context_length: int = 64) -> ModelView:
    return ModelView(
        name="m", digest=b"d" * 16, context_length=context_length, kv_dtype="float32", block_tokens=16,
        layout_version=1, vocab_size=49152,
    )  # fmt: skip


def test_plan_has_the_block_ids_of_the_common_function(text_model: TextModel) -> None:
    key, ids = b"k" * 32, list(range(40))
    request = GenerationRequest(model="m", prompts=[ids], cache_salt="s")
    plan = make_plan(request, text=text_model, view=a_view(), tenant=Tenant("t", 2), block_key=key)
    namespace = cache_namespace(tenant="t", generation=2, cache_salt="s")
    root = block_root(key, model_digest=b"d" * 16, kv_dtype="float32", namespace=namespace)
    assert plan.block_root == root
    assert plan.prompts[0].block_ids == join_ids(chain_block_ids(key, root, ids))
    assert plan.prompts[0].max_tokens == 24
    assert plan.stop_token_ids == (2,)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(63, None, True), (64, None, False), (60, 4, True), (60, 5, False)]
)
def test_context_limit(text_model: TextModel, prompt: int, max_tokens: int | None, fits: bool) -> None:
    request = GenerationRequest(model="m", prompts=[[5] * prompt], max_tokens=max_tokens)
    if fits:
        make_plan(request, text=text_model, view=a_view(), tenant=Tenant("t"), block_key=b"k" * 16)
        return
    with pytest.raises(ContextLengthExceeded):
        make_plan(request, text=text_model, view=a_view(), tenant=Tenant("t"), block_key=b"k" * 16)


@pytest.mark.parametrize("word", ["word ", "a", "日本", "\n", "<|im_end|>", "x1 "])
@pytest.mark.parametrize("kind", ["chat", "prompt"])
def test_a_text_that_cannot_fit_is_not_tokenised_whole(text_model: TextModel, word: str, kind: str) -> None:
    class Counting:
        encoded = 0

        def __getattr__(self, name: str) -> object:
            return getattr(text_model, name)

        def encode_text(self, text: str) -> list[int]:
            self.encoded += len(text)
            return text_model.encode_text(text)

        def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
            raise AssertionError("tokenised whole")

    counting = Counting()
    content = word * (1_000_000 // len(word))
    request = (
        GenerationRequest(model="m", chat=[{"role": "user", "content": content}])
        if kind == "chat"
        else GenerationRequest(model="m", prompts=[content])
    )
    with pytest.raises(ContextLengthExceeded):
        make_plan(request, text=counting, view=a_view(), tenant=Tenant("t"), block_key=b"k" * 16)  # type: ignore[arg-type]
    assert counting.encoded <= 64 * 8


async def test_a_failing_member_does_not_stop_the_pulse() -> None:
    class Member:
        beats = 0

        def pulse(self, now_s: float) -> None:
            self.beats += 1
            if broken is self:
                raise ZeroDivisionError

    pulse, broken, sound = Pulse(0.001, 0.001), Member(), Member()
    pulse.add(broken)
    pulse.add(sound)
    task = asyncio.create_task(pulse.run())
    await eventually(lambda: sound.beats > 3)
    task.cancel()
    assert broken.beats == 1
    assert len(pulse) == 1


async def test_the_pulse_stands_still_without_members() -> None:
    class Member:
        beats = 0

        def pulse(self, now_s: float) -> None:
            self.beats += 1
            pulse.discard(self)

    pulse, member = Pulse(0.001, 0.001), Member()
    task = asyncio.create_task(pulse.run())
    for beats in range(1, 4):
        pulse.add(member)
        await eventually(lambda beats=beats: member.beats == beats)  # type: ignore[misc]
        await eventually(lambda: pulse.is_still)
    task.cancel()


async def test_an_unexpected_error_of_one_prompt_reaches_the_reader(text_model: TextModel) -> None:
    class Broken:
        async def read(self) -> None:
            raise ZeroDivisionError

        def close(self) -> None:
            """Nothing is held."""

    request = GenerationRequest(model="m", prompts=[[5], [6]])
    plan = make_plan(request, text=text_model, view=a_view(), tenant=Tenant("t"), block_key=b"k" * 16)
    generation = Generation(plan, text_model.vocabulary, [Broken(), Broken()])  # type: ignore[list-item]
    async with asyncio.timeout(60):
        with pytest.raises(ZeroDivisionError):
            await generation.read()
    generation.close()


def test_settings_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_GATEWAY_ROUTERS", "a:1, b:2")
    settings = load_settings(GatewaySettings, ["--models", "x,y"])
    assert settings.routers == ("a:1", "b:2")
    assert settings.models == ("x", "y")
    with pytest.raises(ConfigurationError, match="routers"):
        load_settings(GatewaySettings, ["--routers", ","])
