"""One plot of a sweep as SVG: a row for each cluster, a panel for each figure, a line for each policy. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from bench.policies_verdict import Point

_WIDTH, _HEIGHT, _MARGIN = 320, 220, 46
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#111111", "#e377c2", "#ff7f0e")
# Figure, what the panel is called, whether its axis is logarithmic.
_PANELS = (
    ("ttft_p50_s", "TTFT p50, s", True),
    ("ttft_p99_s", "TTFT p99, s", True),
    ("goodput_rps", "within objectives, requests/s", False),
    ("hit_rate_of_ideal", "hit rate / ideal", False),
)


def plot(title: str, sweeps: Mapping[str, Sequence[Point]]) -> str:
    """The SVG document; sweeps: the runs of each cluster, by its title."""
    policies = list(dict.fromkeys(point.policy for points in sweeps.values() for point in points))
    parts = [f'<text x="12" y="18" font-size="14">{title}</text>']
    for number, policy in enumerate(policies):
        x = 12 + number * 130
        parts.append(f'<line x1="{x}" y1="32" x2="{x + 18}" y2="32" stroke="{_colour(number)}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 22}" y="36" font-size="11">{policy}</text>')
    for row, (cluster, points) in enumerate(sweeps.items()):
        top = 58 + row * (_HEIGHT + 16)
        parts.append(f'<text x="12" y="{top}" font-size="12" font-weight="bold">{cluster}</text>')
        for column, (figure, name, is_log) in enumerate(_PANELS):
            panel = _panel(points, policies, figure, name, is_log=is_log)
            parts.append(f'<g transform="translate({column * _WIDTH},{top + 6})">{panel}</g>')
    width, height = len(_PANELS) * _WIDTH + 12, len(sweeps) * (_HEIGHT + 16) + 64
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def _panel(points: Sequence[Point], policies: Sequence[str], figure: str, name: str, *, is_log: bool) -> str:
    values = [point.figures[figure] for point in points]
    across = _axis([point.offered_rps for point in points], _MARGIN, _WIDTH - 10, is_log=False)
    up = _axis(values, _HEIGHT - _MARGIN + 10, 22, is_log=is_log)
    left, bottom = _MARGIN, _HEIGHT - _MARGIN + 10
    parts = [
        f'<text x="{left}" y="14" font-size="12">{name}</text>',
        f'<path d="M{left} 22V{bottom}H{_WIDTH - 10}" fill="none" stroke="#888"/>',
    ]
    for value in _ticks(values, is_log=is_log):
        parts.append(f'<text x="{left - 4}" y="{up(value) + 3:.1f}" font-size="9" text-anchor="end">{value:.3g}</text>')
    for value in sorted({round(point.offered_rps, 1) for point in points})[:: 2 if len(points) > 6 else 1]:
        parts.append(
            f'<text x="{across(value):.1f}" y="{bottom + 12}" font-size="9" text-anchor="middle">{value:.3g}</text>'
        )
    for number, policy in enumerate(policies):
        mine = sorted((point for point in points if point.policy == policy), key=lambda point: point.offered_rps)
        line = " ".join(f"{across(point.offered_rps):.1f},{up(point.figures[figure]):.1f}" for point in mine)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_colour(number)}" stroke-width="1.5"/>')
    return "".join(parts)


def _axis(values: Sequence[float], start: float, end: float, *, is_log: bool) -> Callable[[float], float]:
    """Values to pixels."""
    scale: Callable[[float], float] = (lambda value: math.log10(max(value, 1e-4))) if is_log else (lambda value: value)
    low, high = scale(min(values) if is_log else 0.0), scale(max(values))
    span = (high - low) or 1.0
    return lambda value: start + (end - start) * (scale(value) - low) / span


def _ticks(values: Sequence[float], *, is_log: bool) -> list[float]:
    low, high = (max(min(values), 1e-4), max(max(values), 1e-4)) if is_log else (0.0, max(values))
    if is_log:
        return [low * (high / low) ** (step / 4) for step in range(5)]
    return [low + (high - low) * step / 4 for step in range(5)]


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
