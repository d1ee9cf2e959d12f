"""The figures of a node as `kvmesh ctl kv stats` shows them: lines of a table for people, flat fields for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvmesh.v1 import kvstore_pb2

from services.cli.commands.ctl import row

Stats = kvstore_pb2.StatsResponse
_NONE = "-"


def flat_fields(answer: Stats) -> dict[str, object]:
    """Every field, those of parts under a prefix: ssd_blocks, replication_asked_copies, pulls_ram_p50_s."""
    fields = row(answer)
    for name in ("pulls", "replication"):
        fields.pop(name, None)
    fields.pop("ssd", None)
    if answer.HasField("ssd"):
        fields.update({f"ssd_{name}": value for name, value in row(answer.ssd).items()})
    fields.update({f"replication_{name}": value for name, value in row(answer.replication).items()})
    for pulls in answer.pulls:
        fields.update({f"pulls_{pulls.tier}_{name}": value for name, value in row(pulls).items() if name != "tier"})
    return fields


def table(answers: Sequence[Stats]) -> list[dict[str, object]]:
    """One line for each figure, one column for each node."""
    return [
        {"": label, **{answer.kvstore_id: read(answer) for answer in answers}}
        for label, read in (*_RAM, *_SSD, *_PULLS, *_REPLICATION)
    ]


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _of_ssd(read: Callable[[kvstore_pb2.SsdStats], object]) -> Callable[[Stats], object]:
    return lambda answer: read(answer.ssd) if answer.HasField("ssd") else _NONE


def _duration(tier: str, name: str) -> Callable[[Stats], object]:
    def read(answer: Stats) -> object:
        found = next((pulls for pulls in answer.pulls if pulls.tier == tier and pulls.pulls), None)
        return _NONE if found is None else f"{getattr(found, name) * 1e3:.2f} ms"

    return read


_Lines = Iterable[tuple[str, Callable[[Stats], object]]]
_RAM: _Lines = (
    ("RAM blocks", lambda one: one.ram_blocks),
    ("RAM used", lambda one: f"{_bytes(one.ram_bytes)} of {_bytes(one.ram_capacity_bytes)}"),
    ("RAM hits, blocks", lambda one: one.hit_blocks - one.ssd_hit_blocks),
    ("SSD hits, blocks", lambda one: one.ssd_hit_blocks),
    ("misses, blocks", lambda one: one.miss_blocks),
    ("pushed blocks", lambda one: one.pushed_blocks),
    ("rejected blocks", lambda one: one.rejected_blocks),
    ("incomplete blocks", lambda one: f"{one.partial_blocks} ({one.dropped_partial_blocks} dropped)"),
    ("evicted from RAM", lambda one: one.evicted_blocks),
    ("cleared from RAM", lambda one: one.cleared_blocks),
    ("failed verification", lambda one: one.verification_failures),
    ("leases", lambda one: f"{one.open_leases} on {one.leased_blocks} blocks"),
    ("cleared tenants", lambda one: one.cleared_tenants),
)
_SSD: _Lines = (
    ("SSD state", _of_ssd(lambda ssd: ssd.state)),
    ("SSD encryption", _of_ssd(lambda ssd: "on" if ssd.encrypted else "OFF")),
    ("SSD blocks", _of_ssd(lambda ssd: ssd.blocks)),
    ("SSD used", _of_ssd(lambda ssd: f"{_bytes(ssd.used_bytes)} of {_bytes(ssd.capacity_bytes)}")),
    ("SSD segments, owners", _of_ssd(lambda ssd: f"{ssd.segments}, {ssd.owners}")),
    ("spilled blocks", _of_ssd(lambda ssd: f"{ssd.spilled_blocks} ({ssd.queued_blocks} waiting)")),
    ("dropped unwritten", _of_ssd(lambda ssd: ssd.dropped_blocks)),
    ("read blocks", _of_ssd(lambda ssd: f"{ssd.read_blocks} ({ssd.loads} loads now)")),
    ("copied, reclaimed", _of_ssd(lambda ssd: f"{ssd.copied_blocks}, {ssd.reclaimed_blocks}")),
    ("cleared from SSD", _of_ssd(lambda ssd: ssd.cleared_blocks)),
    ("SSD failed verification", _of_ssd(lambda ssd: ssd.verification_failures)),
)
_PULLS: _Lines = tuple(
    (f"pull from {tier.upper()}, {quantile}", _duration(tier, f"{quantile}_s"))
    for tier in ("ram", "ssd")
    for quantile in ("p50", "p99")
)
_REPLICATION: _Lines = (
    (
        "copies asked, declined",
        lambda one: f"{one.replication.asked_copies}, {one.replication.declined_copies}",
    ),
    (
        "copies refused, failed",
        lambda one: f"{one.replication.refused_copies}, {one.replication.failed_copies}",
    ),
    (
        "copied here",
        lambda one: f"{one.replication.replicated_blocks} ({_bytes(one.replication.replicated_bytes)})",
    ),
)
