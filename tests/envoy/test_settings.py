"""Settings are checked before anything is written, and the command says what was wrong in one line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from deploy.envoy.bootstrap import bootstrap_json
from deploy.envoy.generate import main
from deploy.envoy.settings import Address, EnvoyConfigurationError, EnvoySettings, otlp_address
from services.cli.binaries import envoy_binary

ADMIN = Address("127.0.0.1", 9901)
LISTEN = Address("0.0.0.0", 8080)
GATEWAYS = (Address("gateway", 50051),)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(EnvoyConfigurationError, match="not host:port"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("", None),
        ("http://collector:4317", Address("collector", 4317)),
        ("http://collector", Address("collector", 4317)),
        ("collector:1", Address("collector", 1)),
        ("http://[::1]:4317/", Address("::1", 4317)),
    ],
)
def test_otlp_endpoints(endpoint: str, address: Address | None) -> None:
    assert otlp_address(endpoint) == address


def test_an_encrypted_otlp_endpoint_is_refused() -> None:
    with pytest.raises(EnvoyConfigurationError, match="plain-text"):
        otlp_address("https://collector:4317")


def test_the_admin_page_stays_on_loopback() -> None:
    with pytest.raises(EnvoyConfigurationError, match="loopback"):
        EnvoySettings(listen=LISTEN, admin=Address("0.0.0.0", 9901), gateways=GATEWAYS)


def test_names_are_resolved_and_addresses_are_not() -> None:
    named = json.loads(bootstrap_json(EnvoySettings(LISTEN, ADMIN, GATEWAYS)))
    literal = json.loads(bootstrap_json(EnvoySettings(LISTEN, ADMIN, (Address("127.0.0.1", 1),))))
    assert named["static_resources"]["clusters"][0]["type"] == "STRICT_DNS"
    assert literal["static_resources"]["clusters"][0].get("type", "STATIC") == "STATIC"


def test_envoy_accepts_everything_that_can_be_configured(tmp_path: Path) -> None:
    out = tmp_path / "envoy.json"
    arguments = ["--gateway", "a:1", "--gateway", "b:2", "--metrics", "0.0.0.0:9102", "--otlp", "http://c:4317"]
    assert main([*arguments, "--trace-sampling-percent", "50", "--out", str(out)]) == 0
    subprocess.run([envoy_binary(), "--mode", "validate", "-c", out], check=True, capture_output=True, timeout=30)


def test_a_wrong_value_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gateway", "nowhere", "--out", str(tmp_path / "envoy.json")]) == 2
    assert capsys.readouterr().err == "kvmesh: envoy: 'nowhere' is not host:port\n"
