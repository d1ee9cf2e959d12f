"""Blocks that the mover reads or writes: pulls, pushes and pins. Pure; every slot here is held until the mover's word.

Pull: slots are allocated for the planned blocks that are worth it (`pull_choice`) and given back when PullDone comes,
the arrived ones registered first, so that the scheduler finds them as ordinary prefix hits; PullCut does that early for
what has arrived of a pull that is given up. Push: see `pushes`. Pin: a remote puller reads (`pins`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.common.blocks import BlockId, join_ids
from services.common.transfer.protocol import MAX_WAITING_PULL_S
from services.worker.block_pool import BlockPool
from services.worker.link_rates import LinkRates
from services.worker.messages import HolderRun
from services.worker.mover_messages import CancelPull, PullBlocks, PullCut, PullDone
from services.worker.pins import Pins
from services.worker.pull_choice import HELD_WORTH, choose_pull
from services.worker.push_memory import Node
from services.worker.pushes import Pushes, PushPolicy
from services.worker.sequence import Request


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Bounds: wait for a pull, blocks pinned for pushes, blocks pinned for remote pullers, old blocks to a new node.

    push_policy: which blocks are offered, and when (`pushes`).
    """

    max_pull_s: float = 5.0
    max_push_blocks: int = 256
    max_served_blocks: int = 1024
    repush_blocks_per_s: float = 256.0
    push_policy: PushPolicy = "write_through"


@dataclass(slots=True)
class _Pull:
    request: Request | None
    held: list[int]
    slots: list[int]
    ids: list[BlockId]
    runs: list[HolderRun]
    started_s: float


class Transfers:
    """Everything in flight between the pool and the mover."""

    def __init__(self, limits: TransferLimits, pool: BlockPool, links: LinkRates) -> None:
        self.pushes = Pushes(
            pool,
            policy=limits.push_policy,
            max_push_blocks=limits.max_push_blocks,
            repush_blocks_per_s=limits.repush_blocks_per_s,
        )
        # Planned pulls that did not begin, by reason: "slower" than computing, "no_room" in the pool.
        self.pulls_skipped: dict[str, int] = {"slower": 0, "no_room": 0}
        self.pulls_cut = 0
        self._links = links
        self._limits = limits
        self._pool = pool
        self._pulls: dict[int, _Pull] = {}
        self.pins = Pins(pool, limits.max_served_blocks)

    @property
    def is_idle(self) -> bool:
        """Whether the mover holds no slot."""
        return self.pushes.is_idle and self.pins.is_idle and not self._pulls

    def start_pull(
        self, request: Request, hits: int, now: float, *, reserve: int, block_compute_s: float
    ) -> PullBlocks | None:
        """Begin what is worth pulling of the plan of an admitted request after its `hits` local blocks, if anything.

        Leaves at least `reserve` slots available. block_compute_s: what computing a block takes.
        """
        wanted_ids = request.hit_ids
        wanted = runs_after(request.pull_plan, hits, len(wanted_ids))
        if not wanted or request.key in self._pulls:
            return None
        held = self._pool.match(wanted_ids[:hits])
        room = self._pool.num_available - self._pool.count_unreferenced(held) - reserve
        fitting = runs_after(request.pull_plan, hits, min(len(wanted_ids), hits + room))
        self._links.compute_bytes_per_s = self._links.block_bytes / block_compute_s
        worth_s = block_compute_s * (HELD_WORTH if request.is_held else 1.0)
        choice = choose_pull(fitting, self._links, block_compute_s=worth_s, now=now)
        runs = choice.runs
        if not runs:
            self.pulls_skipped["slower" if fitting else "no_room"] += 1
            return None
        count = sum(run.num_blocks for run in runs)
        self._pool.hold(held)
        slots = self._pool.allocate(count)
        assert slots is not None
        ids = wanted_ids[hits : hits + count]
        self._pulls[request.key] = _Pull(request, held, slots, ids, runs, now)
        self._links.begin(runs)
        deadline_s = min(MAX_WAITING_PULL_S if choice.waits else self._limits.max_pull_s, request.deadline_s - now)
        return PullBlocks(
            request.key,
            request.request_id,
            join_ids(ids),
            slots,
            runs,
            deadline_s,
            request.traceparent,
            choice.patience_s,
            worth_s,
        )

    def cancel_pull(self, key: int) -> CancelPull | None:
        """The request of a pull is gone; its slots stay held until PullDone. None when it pulls nothing."""
        pull = self._pulls.get(key)
        if pull is None or pull.request is None:
            return None
        pull.request = None
        return CancelPull(key)

    def cut_pull(self, cut: PullCut, now: float) -> Request | None:
        """Register what arrived of a pull that is given up; the other slots stay held until PullDone.

        Returns the request, if it still waits.
        """
        pull = self._pulls.get(cut.key)
        if pull is None or not pull.runs:
            return None
        self.pulls_cut += 1
        return self._take_in(pull, cut, now)

    def finish_pull(self, done: PullDone, now: float) -> Request | None:
        """Register what arrived and give all slots back. Returns the request, if it still waits."""
        pull = self._pulls.pop(done.key, None)
        if pull is None:
            return None
        request = self._take_in(pull, done, now) if pull.runs else None
        self._pool.release(pull.slots)
        return request

    def _take_in(self, pull: _Pull, told: PullCut | PullDone, now: float) -> Request | None:
        """Learn from a pull, register what arrived, and let go of that and of the blocks before; once for each pull."""
        self._links.observe(pull.runs, told.runs, now)
        self._links.end(pull.runs)
        parent, memory = pull.held[-1] if pull.held else None, self.pushes.memory
        arrived = min(told.num_blocks, len(pull.slots), len(told.tiers))
        for index in range(arrived):
            parent = pull.slots[index] = self._pool.register(pull.slots[index], pull.ids[index], parent)
            if memory.target is not None and _holder(pull.runs, index) == memory.target:
                memory.holds(pull.ids[index])
        self._pool.release(pull.held + pull.slots[:arrived])
        request, first = pull.request, len(pull.held)
        if request is not None:
            request.pull_s = now - pull.started_s
            request.pulled_tiers = {first + i: told.tiers[i] for i in range(arrived)}
        pull.request, pull.held, pull.slots, pull.runs = None, [], pull.slots[arrived:], []
        return request


def _holder(runs: Sequence[HolderRun], index: int) -> Node | None:
    """Who gave block `index` of a pull."""
    return next(
        (
            (run.location_id, run.epoch)
            for run in runs
            if run.kind == "kvstore" and run.first_block <= index < run.first_block + run.num_blocks
        ),
        None,
    )


def runs_after(plan: Sequence[HolderRun], first: int, end: int) -> list[HolderRun]:
    """The gapless part of `plan` over blocks first..end, indices relative to `first`."""
    runs: list[HolderRun] = []
    position = first
    for run in plan:
        stop = min(run.first_block + run.num_blocks, end)
        if run.first_block > position:
            break
        if stop <= position:
            continue
        num_ssd = max(0, min(stop - position, run.num_ssd_blocks - (run.first_block + run.num_blocks - stop)))
        runs.append(
            msgspec.structs.replace(
                run, first_block=position - first, num_blocks=stop - position, num_ssd_blocks=num_ssd
            )
        )
        position = stop
    return runs
