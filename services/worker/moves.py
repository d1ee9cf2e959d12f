"""Which attempts would better go on at another worker, as far as the scheduler can see. Pure; part of its state.

Each is told once, and nothing here depends on its going: a preempted one waits for blocks as it would have, and a more
urgent request for its turn. A held attempt has just come and is not asked to leave.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from services.worker.messages import MoveReason
from services.worker.sequence import Request, Sequence


class MoveWishes:
    """Gathers wishes until they are taken."""

    def __init__(self) -> None:
        self._wishes: list[tuple[int, MoveReason]] = []

    def preempted(self, request: Request) -> None:
        """A sequence of `request` has lost its blocks."""
        if _may_ask(request):
            self._wish(request, "short_of_blocks")

    def watch_blocks(self, running: Items[Sequence], num_available: int) -> None:
        """Ask the last of `running` before it is preempted: when not each of them can have a further block.

        One at a time, for what it leaves may be enough.
        """
        if num_available >= len(running) or any(sequence.request.asked_to_move for sequence in running):
            return
        last = next((s.request for s in reversed(running[1:]) if _may_ask(s.request)), None)
        if last is not None:
            self._wish(last, "short_of_blocks")

    def make_room(
        self, waiting: Request, running: Items[Sequence], lacking: int, freed: Callable[[Request], int]
    ) -> None:
        """`waiting` lacks a place (lacking 0) or so many blocks: ask the last of `running`, if that is less urgent.

        For a place once; for blocks one after another, for what one frees may not be enough. freed: blocks that
        somebody's going would free. Where nobody is less urgent and blocks are lacking, somebody of its own class goes
        for whom another worker has room, which it may not have for `waiting` (Llumnix calls that de-fragmentation; Sun
        et al., OSDI 2024): the one with the fewest blocks that are enough, else with the most. Who cannot go keeps the
        others from being asked for blocks, for they could hardly.
        """
        is_asked = any(s.request.asked_to_move for s in running) if lacking else waiting.wanted_room
        if is_asked:
            return
        less_urgent = [s.request for s in reversed(running) if s.request.priority > waiting.priority]
        last = next((request for request in less_urgent if _may_ask(request)), None)
        if last is not None:
            waiting.wanted_room = True
            self._wish(last, "priority")
        elif lacking and not waiting.asked_to_move:
            peers = {s.request.key: s.request for s in reversed(running) if s.request.priority == waiting.priority}
            by_blocks = [(freed(request), request) for request in peers.values() if _may_ask(request)]
            enough = [one for one in by_blocks if one[0] >= lacking]
            if by_blocks:
                pick = min(enough, key=_blocks) if enough else max(by_blocks, key=_blocks)
                self._wish(pick[1], "defragmentation")

    def take(self) -> list[tuple[int, MoveReason]]:
        """Keys and reasons since the last call."""
        wishes, self._wishes = self._wishes, []
        return wishes

    def _wish(self, request: Request, reason: MoveReason) -> None:
        request.asked_to_move = True
        self._wishes.append((request.key, reason))


def _blocks(one: tuple[int, Request]) -> int:
    return one[0]


def _may_ask(request: Request) -> bool:
    return not (request.asked_to_move or request.is_held)
