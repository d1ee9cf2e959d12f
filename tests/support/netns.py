"""A network of its own for some processes, which a test can slow down, cut and mend: a namespace behind a veth pair.

All rules lie inside the namespace, so nothing else on the machine is touched, and they go with it.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path

import pytest

# What a link carries before it is slowed down.
LINK_MBIT = 800
_CRAWL_KBIT = 400
_numbers = itertools.count()


class Island:
    """Processes started with `within` have `address`; this network reaches them from `outside`."""

    def __init__(self, name: str, subnet: IPv4Address) -> None:
        """subnet: the first of four addresses."""
        self.name = name
        self.outside, self.address = str(subnet + 1), str(subnet + 2)
        self.within = ("ip", "netns", "exec", name)
        self._near, self._far = f"{name}a", f"{name}b"

    @property
    def received_bytes(self) -> int:
        """What has come from there so far, packets' headers included."""
        return int(Path(f"/sys/class/net/{self._near}/statistics/rx_bytes").read_text())

    @property
    def sent_bytes(self) -> int:
        """What has gone there so far."""
        return int(Path(f"/sys/class/net/{self._near}/statistics/tx_bytes").read_text())

    def drop(self) -> None:
        """A partition: packets vanish both ways."""
        self._rules("-A INPUT -j DROP", "-A OUTPUT -j DROP")

    def drop_incoming(self) -> None:
        """Half open: it speaks and hears nothing."""
        self._rules("-A INPUT -j DROP")

    def drop_outgoing(self) -> None:
        """Half open: it hears and is not heard."""
        self._rules("-A OUTPUT -j DROP")

    def reset(self) -> None:
        """Connections are refused and reset: each packet there is answered with a reset."""
        self._rules("-A INPUT -p tcp -j REJECT --reject-with tcp-reset")

    def unplug(self) -> None:
        """The link goes down."""
        _run("ip", "link", "set", self._near, "down")

    def crawl(self) -> None:
        """Both directions carry almost nothing."""
        self._limit(f"{_CRAWL_KBIT}kbit")

    def limit(self, mbit: int = LINK_MBIT) -> None:
        """Both directions carry so much."""
        self._limit(f"{mbit}mbit")

    def mend(self) -> None:
        """As it was at first."""
        self._rules()
        self.limit()
        _run("ip", "link", "set", self._near, "up")

    def create(self) -> None:
        """Raises CalledProcessError where that is not allowed."""
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.name)
        _run("ip", "addr", "add", f"{self.outside}/30", "dev", self._near)
        _run("ip", "link", "set", self._near, "up")
        _run("ip", "-n", self.name, "addr", "add", f"{self.address}/30", "dev", self._far)
        _run("ip", "-n", self.name, "link", "set", self._far, "up")
        _run("ip", "-n", self.name, "link", "set", "lo", "up")
        self.mend()

    def remove(self) -> None:
        """Whatever there is of it."""
        for command in (("ip", "link", "del", self._near), ("ip", "netns", "del", self.name)):
            subprocess.run(command, capture_output=True, check=False, timeout=30)

    def _rules(self, *rules: str) -> None:
        """These rules and no others, from one moment to the next."""
        lines = "\n".join(("*filter", ":INPUT ACCEPT", ":OUTPUT ACCEPT", *rules, "COMMIT", ""))
        _run(*self.within, "iptables-restore", given=lines)

    def _limit(self, rate: str) -> None:
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        _run("tc", "qdisc", "replace", "dev", self._near, *shape)
        _run("tc", "-n", self.name, "qdisc", "replace", "dev", self._far, *shape)


@contextmanager
def island() -> Iterator[Island]:
    """A fresh one, removed afterwards. Skips the test where there can be none."""
    if reason := impossible():
        pytest.skip(reason)
    made = _fresh()
    try:
        made.create()
        yield made
    finally:
        made.remove()


@functools.cache
def impossible() -> str:
    """Why this machine has no network namespaces for tests; empty when it has."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "iptables-restore") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    probe = _fresh()
    try:
        probe.create()
        probe.reset()
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    finally:
        probe.remove()
    return ""


def _fresh() -> Island:
    number = (os.getpid() * 16 + next(_numbers)) % 2**15
    return Island(f"kvm{number}", IPv4Address("198.18.0.0") + 4 * number)


def _run(*command: str, given: str = "") -> None:
    subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=30)
