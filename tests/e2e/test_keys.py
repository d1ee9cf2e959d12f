"""API keys over the whole mesh: the official client's 401, a key added without a restart, tenants kept apart."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from services.common.bearer_keys import hash_key, new_key
from tests.support.mesh import MODEL, Mesh, wait_for
from tests.support.sim_mesh import running_sim_mesh


def cached_tokens(mesh: Mesh, key: str) -> int:
    """Cached prompt tokens of one fixed request."""
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key=key, max_retries=0, timeout=120) as client:
        answer = client.completions.create(model=MODEL, prompt="A prompt of two tenants. " * 12, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def is_refused(mesh: Mesh, key: str) -> bool:
    """Whether the key is answered with 401."""
    try:
        cached_tokens(mesh, key)
    except openai.AuthenticationError as error:
        return error.code == "invalid_api_key"
    return False


def test_keys_and_tenants(tmp_path: Path) -> None:
    first, second, third = (new_key("kvm") for _ in range(3))
    keys = tmp_path / "keys"
    known = f"{hash_key(first)} one\n{hash_key(second)} two\n"
    keys.write_text(known)
    with running_sim_mesh("--workers", "1", env={"KVMESH_GATEWAY_KEYS_FILE": str(keys)}) as mesh:
        assert is_refused(mesh, "nobody")
        assert is_refused(mesh, third)
        # Nothing of one tenant is found by the other.
        assert [cached_tokens(mesh, key) > 0 for key in (first, first, second, second)] == [False, True, False, True]
        replacement = tmp_path / "keys.new"
        replacement.write_text(f"{known}{hash_key(third)} three\n")
        replacement.replace(keys)
        wait_for(lambda: not is_refused(mesh, third), within_s=60, what="the new key is taken")
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="nobody", max_retries=0).models.list()
        logs = mesh.logs()
        assert not any(key in logs for key in (first, second, third))
