"""What is before a new request, and whether that is too much for it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

from services.common.blocks import BLOCK_TOKENS
from services.worker.admission import SchedulerLimits
from services.worker.block_pool import BlockPool
from services.worker.errors import QueueFull
from services.worker.sequence import Request, Sequence, Status, blocks_for


@dataclass(frozen=True, slots=True)
class Ahead:
    """Everything that the scheduler has. is_parked: of a request that runs when another one has ended, not before."""

    requests: Collection[Request]
    running: Items[Sequence]
    waiting: Items[Sequence]
    pool: BlockPool
    limits: SchedulerLimits
    is_parked: Callable[[Request], bool]

    def expected_tokens(self, sequence: Sequence) -> int:
        """Tokens that a waiting sequence will have computed: siblings of a leader hit its blocks of the prompt."""
        if not self.limits.prefix_cache:
            return sequence.num_missing
        hits = len(self.pool.match(sequence.hit_ids))
        request = sequence.request
        if not request.prefilled and sequence is not request.leader:
            hits = max(hits, min(sequence.num_prompt // BLOCK_TOKENS, len(sequence.hit_ids)))
        return sequence.num_missing - hits * BLOCK_TOKENS

    def room(self) -> tuple[int, int, int]:
        """Places and blocks left once everything admitted that can run does, and the tokens of what cannot."""
        coming = (request for request in self.requests if not self.is_parked(request))
        pulling = sum(s.status is Status.PULLING for request in coming for s in request.sequences)
        places = self.limits.max_running - len(self.running) - pulling
        blocks, queued = self.pool.num_available, 0
        for sequence in self.waiting:
            tokens = self.expected_tokens(sequence)
            if places > 0 and blocks_for(tokens) <= blocks:
                places -= 1
                blocks -= blocks_for(tokens)
            else:
                queued += tokens
        return places, blocks, queued


def check_queue(ahead: Ahead, request: Request, hits: int, max_queued_tokens: float) -> None:
    """Raise QueueFull where more would wait than max_queued_tokens. An idle worker takes anything.

    Work that waits is bounded; so is work the decision did not know of: it expected more than `hits` leading blocks.
    """
    if not ahead.requests:
        return
    places, blocks, excess = ahead.room()
    going_on = [sequence for sequence in request.sequences if sequence.status is not Status.FINISHED]
    tokens = sum(sequence.num_missing if i == 0 else sequence.num_output for i, sequence in enumerate(going_on))
    tokens -= hits * BLOCK_TOKENS
    if len(going_on) > places or blocks_for(tokens) + len(going_on) - 1 > blocks:
        excess += tokens
    else:
        excess = 0
    excess += max(0, request.expected_local_blocks - hits) * BLOCK_TOKENS
    if excess > max_queued_tokens:
        raise QueueFull
