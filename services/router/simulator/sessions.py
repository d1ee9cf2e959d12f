"""Which request comes when: those of a session follow each other. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from services.router.simulator.scenario import Outcome


class Sessions:
    """first: requests that wait for no other."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.first: list[Outcome] = []
        self._later: defaultdict[str, deque[Outcome]] = defaultdict(deque)
        begun: set[str] = set()
        for outcome in outcomes:
            session = outcome.request.session
            if session in begun:
                self._later[session].append(outcome)
                continue
            self.first.append(outcome)
            if session:
                begun.add(session)

    def after(self, outcome: Outcome, now_s: float) -> Outcome | None:
        """The one that follows: it arrives when it did in the trace, but not before this answer, which is there now."""
        queue = self._later.get(outcome.request.session)
        if not queue:
            return None
        following = queue.popleft()
        gap_s = following.request.arrival_s - outcome.request.arrival_s
        following.arrived_s = max(now_s, outcome.arrived_s + gap_s)
        return following
