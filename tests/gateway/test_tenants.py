"""The tenants file: defaults, what a table changes, errors that name the line, and reloading."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.fair_queue import RequestClass
from services.common.settings import ConfigurationError
from services.gateway.errors import InvalidRequest
from services.gateway.retry_budget import RetryBudget
from services.gateway.tenants import TenantPolicy, Tenants, parse_tenants

FILE = """
[default]
most_urgent = "standard"
requests_per_minute = 60

[tenants.acme]
weight = 4
priority = "batch"
most_urgent = "interactive"
fallback_model = "small"
context_tokens = 4096

[tenants.acme.objectives.interactive]
ttft_s = 1.0
tpot_s = 0.05

[tenants."free.tier"]
requests_per_minute = 6
"""


def test_tables_and_what_they_leave_out() -> None:
    policies = parse_tenants(FILE)
    acme, free, default = (policies[name] for name in ("acme", "free.tier", ""))
    assert (acme.weight, acme.requests_per_minute, acme.fallback_model) == (4.0, 60, "small")
    assert acme.objectives.of(RequestClass.INTERACTIVE).ttft_s == 1.0
    assert acme.objectives.of(RequestClass.BATCH).ttft_s == 0.0
    assert (free.weight, free.requests_per_minute, free.most_urgent) == (1.0, 6, "standard")
    assert (default.requests_per_minute, default.has_quota) == (60, True)
    assert not TenantPolicy().has_quota


def test_the_class_of_a_request() -> None:
    policies = parse_tenants(FILE)
    assert policies["acme"].class_of(0) is RequestClass.BATCH
    assert policies["acme"].class_of(1) is RequestClass.INTERACTIVE
    assert policies[""].class_of(0) is RequestClass.STANDARD
    with pytest.raises(InvalidRequest, match="standard is the most urgent") as caught:
        policies[""].class_of(1)
    assert caught.value.param == "priority"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[tenants.a]\nweight = 0\n", "line 2: tenants.a.weight"),
        ("[tenants.a]\n\nwieght = 1\n", "line 3: tenants.a.wieght: Object contains unknown field"),
        ("[default]\nweight = 1\npriority = 'urgent'\n", "line 3: default.priority"),
        ("[tenants.a.objectives.batch]\nttft_s = -1\n", "line 2: tenants.a.objectives.batch.ttft_s"),
        ("[tenants.a]\nrequests_per_minute = 1.5\n", "line 2: tenants.a.requests_per_minute"),
        ("[tenant.a]\nweight = 1\n", r"line 1: tenant: only \[default\] and"),
        ("[tenants]\na = 1\n", "line 2: tenants.a: must be a table"),
        ("[tenants.'a b']\n", "line 1: tenants.a b"),
        ("[tenants.a]\nmost_urgent = 'batch'\n", "line 1: tenants.a.priority: more urgent"),
        ("tenants = 3\n", "line 1: tenants: must be tables"),
        ("[default]\nweight = = 1\n", "line 2"),
    ],
)
def test_mistakes_name_their_line(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        parse_tenants(text)


def test_a_changed_file_is_taken_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    written = iter(range(1, 100))

    def write(text: str) -> None:
        path.write_text(text)
        os.utime(path, ns=(0, next(written) * 10**9))

    write("[tenants.a]\nweight = 2\n")
    tenants = Tenants(path)
    assert (tenants.weight_of("a"), tenants.weight_of("b")) == (2.0, 1.0)
    write("[tenants.a]\nweight = 3\n")
    tenants.refresh(10)
    assert tenants.weight_of("a") == 3
    write("[tenants.a]\nweight = -3\n")
    tenants.refresh(20)
    assert tenants.weight_of("a") == 3
    path.unlink()
    tenants.refresh(30)
    assert tenants.weight_of("a") == 3
    with pytest.raises(ConfigurationError, match="tenants_file"):
        Tenants(path)
    assert Tenants(None).of("anybody") == TenantPolicy()


def test_a_budget_of_retries_is_each_tenant_s_own_and_comes_back() -> None:
    budget = RetryBudget(burst=3, per_s=2)
    assert [budget.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert budget.take("b", 0.0)
    assert [budget.take("a", 0.5), budget.take("a", 0.5)] == [True, False]
    assert [budget.take("a", 100.0) for _ in range(4)] == [True, True, True, False]
