"""When each phase of a move was over, so that whoever waits too long for one can be told where the time went. Pure.

wanted ▸ asked ▸ granted ▸ admitted ▸ prepared ▸ caught up ▸ switched ▸ first token. Until the switch the source goes on
producing: the client waits only for what is left of a step of the source then, and for the target's first token.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.v1.worker_pb2 import Prepared


@dataclass(slots=True)
class MoveTimes:
    """Of one try. Times are monotonic, 0 for what has not come about.

    rounds: how often the target said that it is prepared. pull_s, compute_s: its own account of the first.
    """

    wanted_at_s: float
    asked_at_s: float = 0.0
    granted_at_s: float = 0.0
    admitted_at_s: float = 0.0
    prepared_at_s: float = 0.0
    caught_up_at_s: float = 0.0
    switched_at_s: float = 0.0
    rounds: int = 0
    pull_s: float = 0.0
    compute_s: float = 0.0

    def prepared(self, told: Prepared, now_s: float) -> None:
        """The target has computed what it knew. The last of these counts as having caught up."""
        self.rounds += 1
        self.caught_up_at_s = now_s
        if not self.prepared_at_s:
            self.prepared_at_s, self.pull_s, self.compute_s = now_s, told.pull_s, told.compute_s

    @property
    def phase(self) -> str:
        """What it has come to."""
        reached = {
            "asking": self.asked_at_s,
            "starting": self.granted_at_s,
            "preparing": self.admitted_at_s,
            "catching_up": self.prepared_at_s,
            "switching": self.switched_at_s,
        }
        return next((name for name, at_s in reversed(reached.items()) if at_s), "waiting")

    def seconds(self) -> dict[str, float]:
        """Length of each phase that is over, the target's own account of preparing, and its rounds."""
        ends = {
            "wait_s": self.asked_at_s,
            "ask_s": self.granted_at_s,
            "admit_s": self.admitted_at_s,
            "prepare_s": self.prepared_at_s,
            "catch_up_s": self.caught_up_at_s,
            "align_s": self.switched_at_s,
        }
        found: dict[str, float] = {}
        last_s = self.wanted_at_s
        for name, end_s in ends.items():
            if end_s:
                found[name] = round(end_s - last_s, 4)
                last_s = end_s
        if self.rounds:
            found |= {"pull_s": round(self.pull_s, 4), "compute_s": round(self.compute_s, 4), "rounds": self.rounds}
        return found
