"""The state of moving a prompt's output from the worker that produces it to another, while it goes on. Pure.

The source produces until the target has computed what it was started with. What the source has said by then the target
is to compute, too, as long as it is more than a little: the client waits for what is left at the switch (rounds of
pre-copying, as of virtual machines: Clark et al., "Live Migration of Virtual Machines", NSDI 2005). Then whatever the
source has said is taken, the target is told what of it is new to it, and goes on from there. A target that draws the
same tokens need not wait for that: it draws beside the source, is told what that says, and is gone over to at a good
moment, or after a while at any (beside.py). So the output is the source's up to the switch and the target's after it,
and the record that both are fed from holds each token once. Until the switch the source's side is complete in itself: a
target that fails, or nobody to be the target, costs nothing but another try after a pause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from kvmesh.v1.worker_pb2 import KnownOutput, WorkerGenerateResponse

from services.gateway.output_record import Mark, OutputRecord

_FIRST_PAUSE_S = 0.25
_LAST_PAUSE_S = 2.0
# Rounds after the first, and tokens of an open choice that are not worth one: a step computes them in its time.
_MAX_ROUNDS = 4
_FEW_TOKENS = 2
News = Callable[[WorkerGenerateResponse], WorkerGenerateResponse | None]


class Stage(Enum):
    """STAYING: nobody wants a move. WAITING: for the time to ask. ASKING: for a target. PREPARING: it computes."""

    STAYING = auto()
    WAITING = auto()
    ASKING = auto()
    PREPARING = auto()


@dataclass(frozen=True, slots=True)
class Switch:
    """ready: what the source has said that its reader has not had, in order. further: what the target does not know."""

    ready: list[WorkerGenerateResponse]
    further: list[KnownOutput]


@dataclass(slots=True)
class Move:
    """One output's moves, one at a time. Times are of one clock."""

    output: OutputRecord
    stage: Stage = Stage.STAYING
    _due_at_s: float = 0.0
    _pause_s: float = _FIRST_PAUSE_S
    _tries_left: float = math.inf
    _needs_output: bool = False
    _mark: Mark = field(default_factory=lambda: Mark((), ()))
    _rounds_left: int = 0
    # Tokens that the target was told last.
    _told_tokens: float = math.inf

    def wanted(self, now_s: float, max_tries: float) -> None:
        """The source would rather not go on. Of a move that is on its way it may only raise how often to try."""
        if self.stage is not Stage.STAYING:
            self._tries_left = max(self._tries_left, max_tries)
            return
        self.stage, self._due_at_s, self._pause_s, self._tries_left = Stage.WAITING, now_s, _FIRST_PAUSE_S, max_tries

    def planned(self, max_tries: float) -> list[KnownOutput]:
        """A target was named together with the source, and is started with it. A later one waits for output."""
        self._tries_left, self._pause_s, self._needs_output = max_tries, _FIRST_PAUSE_S, True
        return self.started()

    def is_due(self, now_s: float) -> bool:
        """Whether to ask for a target now. What has only its end left to be told is not moved."""
        if self._needs_output and not self.output.num_tokens:
            return False
        return self.stage is Stage.WAITING and now_s >= self._due_at_s and self.output.num_open > 0

    def asked(self) -> None:
        """A target has been asked for."""
        self.stage = Stage.ASKING

    def started(self) -> list[KnownOutput]:
        """A target is started: with what is known now."""
        self.stage, self._mark = Stage.PREPARING, self.output.mark()
        self._rounds_left, self._told_tokens = _MAX_ROUNDS, math.inf
        return self.output.known()

    def prepared(self) -> list[KnownOutput]:
        """The target has computed what it knows: what it is to compute before the switch. Empty: switch."""
        further, num_open = self.output.known(self._mark), self.output.num_open
        num_tokens = sum(len(choice.token_ids) for choice in further)
        # A source that says as much in every round will not be caught up with.
        is_worth_it = _FEW_TOKENS * num_open < num_tokens < self._told_tokens
        if not self._rounds_left or not num_open or not is_worth_it:
            return []
        self._mark, self._rounds_left, self._told_tokens = self.output.mark(), self._rounds_left - 1, num_tokens
        return further

    def told(self) -> list[KnownOutput]:
        """A target that draws is told what it has not been told yet."""
        further, self._mark = self.output.known(self._mark), self.output.mark()
        return further

    def failed(self, now_s: float) -> None:
        """There is no target, or none any more: try again later, each time longer, as often as is worth it."""
        self._tries_left -= 1
        self.stage = Stage.WAITING if self._tries_left > 0 else Stage.STAYING
        self._due_at_s = now_s + self._pause_s
        self._pause_s = min(_LAST_PAUSE_S, 2 * self._pause_s)

    def switch(self, unread: Iterable[WorkerGenerateResponse], news: News) -> Switch | None:
        """Go on at the target, which is prepared or the only one left. None when the source has said all already.

        unread: what the source has said and its reader has not had. news: what of a message lies beyond the record as
        that is then, None for nothing. An output that is over thereby needs no target either.
        """
        messages = list(unread)
        self.stage = Stage.STAYING
        if any(message.HasField("completed") for message in messages):
            return None
        told = (message for message in messages if message.HasField("tokens") or message.HasField("finish"))
        # Each is noted before the next is looked at, which may overlap it.
        beyond = (one for one in map(news, told) if one is not None)
        ready = [message for message in beyond if self.output.note(message)]
        ready += self.output.loose_ends()
        return Switch(ready, self.output.known(self._mark))

    def end(self) -> None:
        """There is no source any more."""
        self.stage = Stage.STAYING
