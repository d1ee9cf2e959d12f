"""What a sweep over policies says of the default one: against the others and against the oracle. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.router.simulator import oracle

_SUBJECT = "predicted_ttft"
_PLAIN = "round_robin"
_GOOD = "goodput_share"
_RATE = "goodput_rps"
_TTFT = "ttft_mean_s"


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a policy at one load; figures as `Summary` names them."""

    policy: str
    load: float
    figures: Mapping[str, float]

    @property
    def offered_rps(self) -> float:
        """Requests/s that arrived."""
        return self.figures["offered_rps"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The worst over all loads of the default policy's goodput over another's, and of its mean TTFT over the oracle's;
    None where the other did not run.
    """

    over_plain: float | None
    over_oracle: float | None
    over_others: float | None
    ttft_over_oracle: float | None

    def __str__(self) -> str:
        return (
            f"{_SUBJECT}, the worst of all loads: goodput {_shown(self.over_plain)} of {_PLAIN}'s, "
            f"{_shown(self.over_oracle)} of the oracle's, {_shown(self.over_others)} of the best other policy's; "
            f"mean TTFT {_shown(self.ttft_over_oracle)} of the oracle's"
        )


def verdict(points: Sequence[Point]) -> Verdict:
    """Of the runs of one cluster."""
    others = {point.policy for point in points} - {_SUBJECT, oracle.NAME}
    return Verdict(
        _extreme(points, {_PLAIN}, _RATE, min),
        _extreme(points, {oracle.NAME}, _RATE, min),
        _extreme(points, others, _RATE, min),
        _extreme(points, {oracle.NAME}, _TTFT, max),
    )


def sustained(points: Sequence[Point], share: float) -> dict[str, float]:
    """Of each policy the requests/s up to which at least `share` are served in time."""
    policies = dict.fromkeys(point.policy for point in points)
    return {policy: _sustained([point for point in points if point.policy == policy], share) for policy in policies}


def _extreme(
    points: Sequence[Point], others: set[str], figure: str, worst: Callable[[list[float]], float]
) -> float | None:
    ours = {point.load: point.figures[figure] for point in points if point.policy == _SUBJECT}
    ratios = [
        ours[point.load] / point.figures[figure]
        for point in points
        if point.policy in others and point.load in ours and point.figures[figure] > 0
    ]
    return worst(ratios) if ratios else None


def _sustained(points: Sequence[Point], share: float) -> float:
    """Between the measured loads by straight lines: the highest rate offered where all loads were sustained, or 0."""
    ordered = sorted(points, key=lambda point: point.offered_rps)
    best = 0.0
    for before, after in zip([None, *ordered], ordered, strict=False):
        if after.figures[_GOOD] >= share:
            best = after.offered_rps
            continue
        if before is not None:
            high, low = before.figures[_GOOD], after.figures[_GOOD]
            best = before.offered_rps + (after.offered_rps - before.offered_rps) * (high - share) / (high - low)
        break
    return best


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
