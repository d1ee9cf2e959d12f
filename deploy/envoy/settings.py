"""What the Envoy configuration is made from. Addresses are "host:port"."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from services.common.rpc import MAX_MESSAGE_BYTES

# gRPC counts the HttpBody around the body (content type, field tags) against its limit: room for that.
_ENVELOPE_BYTES = 64 * 1024


class EnvoyConfigurationError(Exception):
    """A setting is wrong; the message is one line that names it."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Split "host:port" (or "[v6]:port"). Raises EnvoyConfigurationError."""
        host, separator, port = text.rpartition(":")
        if not (separator and host and port.isdecimal() and 0 < int(port) < 65536):
            raise EnvoyConfigurationError(f"{text!r} is not host:port")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_ip(self) -> bool:
        """Whether the host is a literal address, not a name to resolve."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """One edge proxy.

    admin must be on loopback; metrics, where set, serves nothing but Envoy's Prometheus page and may be public.
    max_body_bytes is the largest HTTP body accepted; beyond it the answer is 413.
    """

    listen: Address
    admin: Address
    gateways: tuple[Address, ...]
    metrics: Address | None = None
    otlp: Address | None = None
    trace_sampling_percent: float = 100.0
    max_body_bytes: int = MAX_MESSAGE_BYTES - _ENVELOPE_BYTES
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 600.0
    connect_timeout_s: float = 1.0
    health_interval_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.gateways:
            raise EnvoyConfigurationError("gateways: none given")
        if not self.admin.is_ip or not ipaddress.ip_address(self.admin.host).is_loopback:
            raise EnvoyConfigurationError(f"admin={self.admin.host}: not a loopback address")
        if not 0 < self.max_body_bytes <= MAX_MESSAGE_BYTES - _ENVELOPE_BYTES:
            raise EnvoyConfigurationError(f"max_body_bytes={self.max_body_bytes}: beyond the limit of the other hops")
        if not 0 <= self.trace_sampling_percent <= 100:
            raise EnvoyConfigurationError(f"trace_sampling_percent={self.trace_sampling_percent}: not in [0, 100]")


def otlp_address(endpoint: str) -> Address | None:
    """The collector of an `OTEL_EXPORTER_OTLP_ENDPOINT` value (gRPC, plain text); None when it is empty."""
    if not endpoint:
        return None
    scheme, separator, rest = endpoint.rpartition("://")
    if separator and scheme != "http":
        raise EnvoyConfigurationError(f"OTLP endpoint {endpoint!r}: only plain-text gRPC (http://) is supported")
    authority = rest.split("/", 1)[0]
    return Address.parse(authority if ":" in authority else f"{authority}:4317")
