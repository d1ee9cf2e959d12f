"""The ranks of a replica as torch.distributed sees them: gloo between those that have met (meeting.py).

Sums are gathered from all ranks of a stage and added in the order of the ranks, so that every rank has the same bits
and a row's do not depend on what stands beside it; gloo's own sum adds in an order that depends on the place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from services.worker.errors import RankLost
from services.worker.model.shard import Shard
from services.worker.parallel.meeting import Meeting

_TAG = 0
# Its stubs lack most of what it has.
_distributed: Any = dist


class Group:
    """Ranks (model/rank_loading.py): what one rank has of the group."""

    def __init__(
        self,
        shard: Shard,
        meeting: Meeting,
        *,
        load_timeout_s: float,
        step_timeout_s: float,
        is_spread: bool = False,
    ) -> None:
        """Wait for all ranks. load_timeout_s: of this, and of what is gathered from all. step_timeout_s: of every wait
        for another rank in the midst of a step. is_spread: see Ranks. Raises RankLost.
        """
        self.shard = shard
        self.is_spread = is_spread
        self._gathered = torch.empty(0)
        self._step_timeout = timedelta(seconds=step_timeout_s)
        # The wait's own limit would leave gloo at it, and `close` waiting for that.
        self._in_step = _distributed.distributed_c10d.AllgatherOptions()
        self._in_step.timeout = self._step_timeout
        size, timeout = shard.parallelism.stage_size, timedelta(seconds=load_timeout_s)
        with _peers_answer():
            self._all = _gloo("all", meeting, shard.rank, shard.parallelism.num_ranks, timeout)
            self._stage = _gloo(f"stage {shard.stage}", meeting, shard.place, size, timeout)

    @property
    def sums(self) -> bool:
        """See Seam."""
        return self.shard.parallelism.stage_size > 1

    @property
    def is_first(self) -> bool:
        """See Seam."""
        return self.shard.is_first

    @property
    def is_last(self) -> bool:
        """See Seam."""
        return self.shard.is_last

    @property
    def first_token(self) -> int:
        """See Seam."""
        return self.shard.vocabulary.start

    def sum(self, values: torch.Tensor) -> None:
        """See Seam."""
        flat, size = values.view(-1), self.shard.parallelism.stage_size
        if self._gathered.numel() < size * len(flat):
            self._gathered = torch.empty(size * len(flat))
        parts = self._gathered[: size * len(flat)].view(size, -1)
        with _peers_answer():
            self._stage.allgather([list(parts)], [flat], self._in_step).wait()
        torch.add(parts[0], parts[1], out=flat)
        for part in parts[2:]:
            flat += part

    def receive(self, residual: torch.Tensor) -> None:
        """See Seam."""
        self._receive(residual, self.shard.rank - self.shard.parallelism.stage_size)

    def send(self, residual: torch.Tensor) -> None:
        """See Seam."""
        self._send(residual.contiguous(), self.shard.rank + self.shard.parallelism.stage_size)

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """See Ranks."""
        parts = [torch.empty_like(values) for _ in range(self.shard.parallelism.num_ranks)]
        with _peers_answer():
            self._all.allgather([parts], [values]).wait()
        return parts

    def meet(self) -> None:
        """Wait until all ranks have come so far: whoever waits for a step of theirs does not wait for a load."""
        self.gather(torch.zeros(1))

    def send_logits(self, logits: torch.Tensor) -> None:
        """Of a rank of the last stage: float32 [L, its part of the vocabulary], L above 0, to rank 0."""
        self._send(logits, 0)

    def receive_logits(self, own: torch.Tensor) -> torch.Tensor:
        """Of rank 0: float32 [L, vocab_size] from the ranks of the last stage, of which it may be one with `own`.

        own: [L, ...], so that L is known to a rank 0 that has no logits too.
        """
        shard = self.shard
        logits = own.new_empty(len(own), shard.whole.vocab_size)
        last = shard.parallelism.num_ranks - shard.parallelism.stage_size
        for rank in range(last, shard.parallelism.num_ranks) if len(own) else ():
            part, found = Shard(shard.whole, shard.parallelism, rank).vocabulary, own
            if rank:
                found = own.new_empty(len(own), len(part))
                self._receive(found, rank)
            logits[:, part.start : part.stop] = found
        return logits

    def close(self) -> None:
        """Leave the group; nothing can be exchanged any more."""
        del self._all, self._stage

    def _send(self, values: torch.Tensor, rank: int) -> None:
        with _peers_answer():
            self._all.send([values], rank, _TAG).wait(self._step_timeout)

    def _receive(self, values: torch.Tensor, rank: int) -> None:
        with _peers_answer():
            self._all.recv([values], rank, _TAG).wait(self._step_timeout)


def _gloo(name: str, meeting: Meeting, rank: int, num_ranks: int, timeout: timedelta) -> Any:
    # Not init_process_group, whose groups are the process's: what is made here ends with its owner.
    gloo = _distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [meeting.device], timeout
    return gloo(_distributed.PrefixStore(name, meeting.store), rank, num_ranks, options)


@contextmanager
def _peers_answer() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank does not answer: {str(error).splitlines()[0]}") from error
