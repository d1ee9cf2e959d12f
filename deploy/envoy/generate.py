"""Writes an Envoy bootstrap: `python -m deploy.envoy.generate --gateway HOST:PORT --out envoy.json`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.envoy.bootstrap import bootstrap_json
from deploy.envoy.settings import Address, EnvoyConfigurationError, EnvoySettings, otlp_address


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 and one line on stderr when a value is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        text = bootstrap_json(_settings(arguments))
        arguments.out.write_text(text)
    except (EnvoyConfigurationError, OSError) as error:
        sys.stderr.write(f"kvmesh: envoy: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.envoy.generate", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--gateway", action="append", required=True, help="gateway's host:port; repeat for more")
    parser.add_argument("--listen", default="0.0.0.0:8080", help="public address")
    parser.add_argument("--admin", default="127.0.0.1:9901", help="admin address, loopback only")
    parser.add_argument("--metrics", help="address of a listener that serves /metrics; absent: none")
    parser.add_argument(
        "--otlp",
        default=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
        help="OTLP gRPC endpoint, http://host:port; default: OTEL_EXPORTER_OTLP_ENDPOINT; empty: no tracing",
    )
    parser.add_argument("--trace-sampling-percent", type=float, default=100.0, help="traces begun here that are kept")
    return parser


def _settings(arguments: argparse.Namespace) -> EnvoySettings:
    return EnvoySettings(
        listen=Address.parse(arguments.listen),
        admin=Address.parse(arguments.admin),
        gateways=tuple(Address.parse(one) for one in arguments.gateway),
        metrics=Address.parse(arguments.metrics) if arguments.metrics else None,
        otlp=otlp_address(arguments.otlp),
        trace_sampling_percent=arguments.trace_sampling_percent,
    )


if __name__ == "__main__":
    sys.exit(main())
