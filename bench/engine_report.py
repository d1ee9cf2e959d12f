"""What `bench.engine_peers` prints and writes: figures, ratios to vLLM with their targets, ratios to the floors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.engine_floors import Floor, Peaks
from bench.kv_table import Machine
from bench.load import Figures, medians

# Output tokens/s over vLLM's, by concurrency, that the mesh is to reach in BF16.
TARGETS = {1: 1.05, 4: 1.2, 16: 1.2}
_OURS, _PEER, _SLOW_PEER, _OURS_INT8 = "kvmesh", "vLLM", "llama.cpp", "kvmesh INT8"
_WIDTH = 150
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Document:
    """Everything that was found. results: rounds by server and (workload, concurrency)."""

    command: str
    machine: Machine
    arithmetic: Mapping[str, str]
    idle_cores: Mapping[str, float]
    peaks: Peaks
    floors: Mapping[Key, Floor]
    results: Mapping[str, Mapping[Key, Sequence[Figures]]]

    def median(self, server: str, key: Key) -> Figures | None:
        """Median figures of a cell; None where the server took no part."""
        rounds = self.results.get(server, {}).get(key)
        return medians(rounds) if rounds else None


def ratios(document: Document, key: Key) -> dict[str, Any]:
    """The mesh against vLLM in one cell: tokens/s, TTFT and TPOT over vLLM's, and whether targets are met."""
    ours, peer = document.median(_OURS, key), document.median(_PEER, key)
    if ours is None or peer is None:
        return {}
    target = TARGETS.get(key[1])
    tokens_ratio = ours.output_tokens_per_s / peer.output_tokens_per_s
    return {
        "tokens_per_s": round(tokens_ratio, 3),
        "ttft_p50": round(ours.ttft_p50_ms / peer.ttft_p50_ms, 3),
        "tpot_p50": round(ours.tpot_p50_ms / peer.tpot_p50_ms, 3),
        "target_tokens_per_s": target,
        "met": ours.ttft_p50_ms < peer.ttft_p50_ms and (target is None or tokens_ratio >= target),
    }


def show(document: Document) -> None:
    """Three tables."""
    console = Console(width=_WIDTH)
    console.print(_figures_table(document))
    console.print(_ratios_table(document))
    int8_line = _int8_line(document)
    if int8_line:
        console.print(int8_line)
    peaks = document.peaks
    console.print(
        f"floors: weights read at {peaks.read_bytes_per_s / 1e9:.1f} GB/s, BF16 products at "
        f"{peaks.matmul_flop_per_s / 1e9:.0f} GFLOP/s, both measured before; linear layers only"
    )
    console.print(f"idle, cores: {dict(document.idle_cores)}")


def _figures_table(document: Document) -> Table:
    table = Table(title="median over rounds")
    for name in ("workload", "c", "server", "arithmetic"):
        table.add_column(name)
    for name in ("TTFT p50 ms", "p99 ms", "TPOT p50 ms", "tokens/s", "÷ floor", "rounds"):
        table.add_column(name, justify="right")
    for key, floor in document.floors.items():
        for server in document.results:
            found = document.median(server, key)
            if found is None:
                continue
            table.add_row(
                key[0],
                str(key[1]),
                server,
                document.arithmetic[server],
                f"{found.ttft_p50_ms:.0f}",
                f"{found.ttft_p99_ms:.0f}",
                f"{found.tpot_p50_ms:.2f}",
                f"{found.output_tokens_per_s:.1f}",
                f"{found.output_tokens_per_s / floor.output_tokens_per_s:.2f}",
                str(len(document.results[server][key])),
            )
        table.add_section()
    return table


def _ratios_table(document: Document) -> Table:
    table = Table(title="kvmesh over vLLM, and over the floor (TTFT and TPOT: how many times the least possible)")
    for name in ("workload", "c"):
        table.add_column(name)
    for name in ("tokens/s", "target", "TTFT p50", "TPOT p50", "met", "TTFT ÷ floor", "TPOT ÷ floor"):
        table.add_column(name, justify="right")
    for key, floor in document.floors.items():
        found, ours = ratios(document, key), document.median(_OURS, key)
        if ours is None:
            continue
        against = [str(found.get(name, "")) for name in ("tokens_per_s", "target_tokens_per_s", "ttft_p50", "tpot_p50")]
        met = {True: "yes", False: "no"}.get(found.get("met", ""), "")
        floors = [f"{ours.ttft_p50_ms / floor.ttft_ms:.2f}", f"{ours.tpot_p50_ms / floor.tpot_ms:.2f}"]
        table.add_row(key[0], str(key[1]), *against, met, *floors)
    return table


def _int8_line(document: Document) -> str:
    """TPOT at concurrency 1 with INT8 weights against llama.cpp's Q4_1."""
    key = next((key for key in document.floors if key[1] == 1), None)
    ours = document.median(_OURS_INT8, key) if key else None
    peer = document.median(_SLOW_PEER, key) if key else None
    if ours is None or peer is None:
        return ""
    return f"TPOT at concurrency 1: kvmesh INT8 {ours.tpot_p50_ms:.2f} ms, llama.cpp Q4_1 {peer.tpot_p50_ms:.2f} ms"


def write(document: Document, path: Path) -> None:
    """JSON with every round."""
    rows = [
        {
            "workload": key[0],
            "concurrency": key[1],
            "server": server,
            "arithmetic": document.arithmetic[server],
            **medians(rounds).as_dict(),
            "rounds": [one.as_dict() for one in rounds],
        }
        for key in document.floors
        for server, cells in document.results.items()
        if (rounds := cells.get(key))
    ]
    found = {
        "command": document.command,
        "machine": asdict(document.machine),
        "idle_cores": document.idle_cores,
        "peaks": document.peaks.as_dict(),
        "floors": [
            {"workload": key[0], "concurrency": key[1], **floor.as_dict()} for key, floor in document.floors.items()
        ],
        "ratios_to_vllm": [
            {"workload": key[0], "concurrency": key[1], **ratios(document, key)} for key in document.floors
        ],
        "rows": rows,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
