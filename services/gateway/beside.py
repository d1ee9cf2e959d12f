"""A target that draws the same tokens beside the source, until it is the one to read. Pure.

The client is given what the source says; what the target says of it is only compared, whichever of them says it first.
The target is told what the source has said, so that it is never behind by more than the step that it is in. It is gone
over to when it brings a token that the source has not, for then nobody waits at all, or when it brings the latest one
hardly later. Where it is the slower one neither may ever be, and after a while it is gone over to at its next token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvmesh.v1.worker_pb2 import WorkerGenerateResponse

from services.gateway.output_record import OutputRecord

# So much later, as a share of the time between two tokens of a choice of the source, is hardly later.
_CLOSE_SHARE = 0.25
# How long both draw in the hope of a better moment than the next, and than the next at which the target is level.
_CHOOSY_S = 0.3
_MAX_S = 0.6


@dataclass(slots=True)
class Beside:
    """Since began_s. brought: what the target has said beyond the record, in order. Times are of one clock.

    _source_at_s: when the source last said a token, of each choice.
    """

    output: OutputRecord
    began_s: float
    brought: list[WorkerGenerateResponse] = field(default_factory=list)
    _reached: dict[int, int] = field(default_factory=dict)
    _source_at_s: dict[int, float] = field(default_factory=dict)
    _source_step_s: float = 0.0

    def heard_source(self, choice: int, now_s: float) -> None:
        """The source has said a token of a choice, which is in the record. Raises OutputDiverged."""
        # Of several choices those of one step come at one moment.
        if choice in self._source_at_s:
            self._source_step_s = now_s - self._source_at_s[choice]
        self._source_at_s[choice] = now_s
        beyond = (self.output.news(message, message.tokens.position) for message in self.brought)
        self.brought = [message for message in beyond if message is not None]

    def heard_target(self, message: WorkerGenerateResponse, now_s: float) -> bool:
        """The target has said something; whether to go over to it now. Raises OutputDiverged."""
        tokens = message.tokens
        news = self.output.news(message, self._reached.get(tokens.choice, 0))
        if news is not None:
            self.brought.append(news)
        if not message.HasField("tokens"):
            return False
        self._reached[tokens.choice] = tokens.position + len(tokens.token_ids)
        drawn_s = now_s - self.began_s
        if drawn_s > _MAX_S:
            return True
        if not self.output.is_reached(self._reached):
            return False
        is_close = now_s - max(self._source_at_s.values(), default=-math.inf) <= _CLOSE_SHARE * self._source_step_s
        return news is not None or is_close or drawn_s > _CHOOSY_S
