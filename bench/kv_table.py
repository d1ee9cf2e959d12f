"""What `bench.kv` prints and writes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.kv_measure import Row
from bench.kv_ram import MEMCPY, TCP
from bench.kv_ssd import DISK

_COLUMNS = ("block", "×", "from", "path", "GB/s", "unverified", "p50 µs", "p99 µs", "CPU s/GB")
_RATIOS = {"÷ memcpy": MEMCPY, "÷ TCP": TCP, "÷ disk": DISK}
_LEFT = ("from", "path")
_WIDTH = 160


@dataclass(frozen=True, slots=True)
class Machine:
    """What ran here, and how busy it was at the start."""

    cpus: int
    model: str
    kernel: str
    load_average: float
    commit: str

    @staticmethod
    def here() -> Machine:
        """This machine now."""
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
        described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
        load = round(os.getloadavg()[0], 2)
        return Machine(os.cpu_count() or 1, model, os.uname().release, load, described.stdout.strip())


def write(path: Path, rows: Sequence[Row], idle: dict[str, float], left_out: dict[str, str], machine: Machine) -> None:
    """Write the rows as JSON."""
    path.parent.mkdir(exist_ok=True)
    found = {"machine": asdict(machine), "idle_cpu": idle, "peers_left_out": left_out, "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")


def show(rows: Sequence[Row], idle: dict[str, float], left_out: dict[str, str], machine: Machine) -> None:
    """Print the table."""
    table = Table(title="KV blocks from a kvstore node of this host; verified where it is one of ours")
    for column in (*_COLUMNS, *_RATIOS):
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    for cell in sorted({(row["block_bytes"], row["in_flight"]) for row in rows}):
        part = [row for row in rows if (row["block_bytes"], row["in_flight"]) == cell]
        for row in part:
            if row["verified"] or not _twin(row, part, verified=True):
                table.add_row(*_texts(row, part))
        table.add_section()
    console = Console(width=_WIDTH)
    console.print(table)
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}")
    if idle:
        shares = ", ".join(f"{name} {share:.2%}" for name, share in idle.items())
        console.print(f"idle, of one core: {shares}")
    console.print(f"{machine.model}, {machine.cpus} cores, load average at the start {machine.load_average}")


def _texts(row: Row, part: Sequence[Row]) -> list[str]:
    plain = _twin(row, part, verified=False) or row
    rate = f"{row['gb_per_s']:.2f}" if row["verified"] or row["ceiling"] else ""
    unverified = "" if plain["verified"] or plain["ceiling"] else f"{plain['gb_per_s']:.2f}"
    times = [f"{row['p50_us']:,.0f}", f"{row['p99_us']:,.0f}", f"{row['cpu_s_per_gb']:.2f}"]
    size = f"{row['block_bytes'] // 1024} KiB"
    source = " ".join(word for word in (row["tier"], row.get("cache", "")) if word)
    return [size, str(row["in_flight"]), source, _path(row), rate, unverified, *times, *_ratios(row, part)]


def _path(row: Row) -> str:
    detail = f", {row['path']}" if row.get("path") else ""
    return f"{row['transport']}{detail}" + (f" ({row['failed']} failed)" if "failed" in row else "")


def _ratios(row: Row, part: Sequence[Row]) -> list[str]:
    rates = {
        one["transport"]: one["gb_per_s"] for one in part if one["ceiling"] and one["tier"] in ("ram", row["tier"])
    }
    return [f"{row['gb_per_s'] / rates[name]:.2f}" if name in rates else "" for name in _RATIOS.values()]


def _twin(row: Row, part: Sequence[Row], *, verified: bool) -> Row | None:
    """The same path with or without verification."""
    same = ("transport", "path", "tier", "cache")
    return next(
        (
            one
            for one in part
            if one is not row and one["verified"] is verified and all(one.get(name) == row.get(name) for name in same)
        ),
        None,
    )
