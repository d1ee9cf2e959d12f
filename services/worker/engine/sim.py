"""A simulated engine in the front's own process: the real loop, core and pool on a thread, over a runner that sleeps.

There is no pool in memory and no mover. Nothing is pushed, the replica names no address to pull from, and a pull that
it is asked for brings nothing, so that its blocks are computed. With sim_transfers there are both, as in a worker that
computes: blocks of zeros are pulled, waited for and verified, and moves and handoffs cost what they cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NoReturn

import structlog

from services.common.blocks import BLOCK_TOKENS, tagged
from services.common.models import ModelSource
from services.common.time_model import TimeModel
from services.common.tokenizer_digest import tokenizer_digest
from services.worker.block_transfers import SharedTransfers
from services.worker.children import SharedParts
from services.worker.config import WorkerSettings
from services.worker.core import EngineCore
from services.worker.engine.config import EngineConfig
from services.worker.engine.limits import core_limits
from services.worker.engine.loop import EngineLoop
from services.worker.engine.sim_model import SimModel, read_sim_model
from services.worker.engine.sim_runner import SimRunner
from services.worker.engine.sim_settings import time_model
from services.worker.engine_messages import (
    EngineFailed,
    EngineReady,
    FromEngineToFront,
    FromFrontToEngine,
    MemoryFigures,
)
from services.worker.errors import ChildDied, StartFailed
from services.worker.ipc import AsyncLink, Link
from services.worker.link_rates import LinkRates
from services.worker.messages import Message
from services.worker.model.layout import KvLayout
from services.worker.mover_messages import FromMoverToEngine, MoverCounters, PullBlocks, PullDone
from services.worker.rates import Rates

_DEFAULT_POOL_BYTES = 2**30
_END_TIMEOUT_S = 5.0
_COUNTERS_EVERY_S = 1.0
_DIGEST_BYTES = 16
_TAG_SIMULATED, _TAG_TOKENIZER, _TAG_SHAPE, _TAG_NOTHING = 96, 97, 98, 99
_log = structlog.get_logger()


class SimEngine:
    """The engine's loop on a thread, as a Part (children.py)."""

    role = "engine"
    pid = None

    def __init__(self, link: AsyncLink[Any]) -> None:
        self.link = link
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()

    def start(self, engine: EngineLoop, front: Link[Message], mover: socket.socket) -> None:
        """Run until the link closes. front: the engine's end of it; mover: what is to be closed then, too."""
        threading.Thread(target=self._run, args=(engine, front, mover), name="sim-engine", daemon=True).start()

    async def watch(self) -> NoReturn:
        """Wait for its end. Raises ChildDied."""
        await self._ended.wait()
        raise ChildDied("the simulated engine has ended")

    async def end(self) -> None:
        """Close the link and wait for the thread, which may be in a step. Idempotent."""
        await self.link.close()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError:
            _log.warning("the simulated engine is left in a step", waited_s=_END_TIMEOUT_S)

    def _run(self, engine: EngineLoop, front: Link[Message], mover: socket.socket) -> None:
        try:
            engine.run()
        except ConnectionError:
            _log.info("the front has gone")
        except Exception as error:
            _log.exception("the simulated engine has failed")
            with contextlib.suppress(ConnectionError):
                front.send(EngineFailed(str(error).splitlines()[0], type(error).__name__))
        finally:
            front.socket.close()
            mover.close()
            # The process may be ending.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ended.set)


class NoMover:
    """In the mover's place, as a Part: tells that nothing moves."""

    role = "mover"
    pid = None

    def __init__(self) -> None:
        self.link = self

    def send(self, message: Message) -> None:
        """What a mover is told is about transfers, and there are none."""

    async def receive(self) -> MoverCounters:
        """A sign of life."""
        await asyncio.sleep(_COUNTERS_EVERY_S)
        return MoverCounters(0, 0, 0, 0, 0, 0, 0)

    async def receive_all(self) -> list[MoverCounters]:
        """The same."""
        return [await self.receive()]

    async def watch(self) -> NoReturn:
        """It never ends by itself."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def end(self) -> None:
        """Nothing is to be ended."""


class NoTransfers:
    """BlockTransfers (block_transfers.py) without a mover: pulls bring nothing."""

    is_settled = True

    def __init__(self) -> None:
        self.to_core: list[Message] = []
        self.to_mover: list[Message] = []
        self.waits: dict[str, int] = {}
        self.short_blocks: dict[str, int] = {}

    def send(self, message: Message, now: float) -> None:
        """Answer a pull; by the time that it might be cancelled it has been answered."""
        if isinstance(message, PullBlocks):
            self.to_core.append(PullDone(message.key, 0, [], "a simulated worker pulls nothing"))

    def receive(self, message: Message, now: float) -> None:
        """Nobody says anything."""

    def poll(self, now: float) -> None:
        """Nothing waits."""


async def start_simulation(
    settings: WorkerSettings,
    source: ModelSource,
    config: EngineConfig,
    block_key: bytes,
    stack: AsyncExitStack,
    parts: SharedParts | None = None,
) -> tuple[SimEngine, EngineReady]:
    """Start the engine's thread, to be ended with the stack. Raises StartFailed, ConfigurationError.

    parts: what it shares with a mover, whose pool is sized here; None: there is none.
    """
    model, times = await asyncio.to_thread(read_sim_model, source), time_model(settings)
    layout = KvLayout(model.shape.num_kv_heads, model.shape.num_layers, model.shape.head_dim, settings.dtype)
    num_blocks = settings.num_blocks or layout.num_blocks(settings.kv_cache_bytes or _DEFAULT_POOL_BYTES)
    if num_blocks < 1:
        raise StartFailed(f"kv_cache_bytes={settings.kv_cache_bytes}: a block takes {layout.block_bytes}")
    limits = core_limits(
        config,
        max_context=min(settings.max_context or model.shape.context_length, model.shape.context_length),
        vocab_size=model.shape.vocab_size,
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
    )
    # What it draws has probability one, and nothing else has any.
    limits = replace(limits, scheduler=replace(limits.scheduler, scores_prompts=False))
    rates = Rates(times.prefill_tokens_per_s, times.step_s(0, 1))
    core = EngineCore(limits, num_blocks, block_key, rates, LinkRates(layout.block_bytes, settings.pull_half_life_s))
    front_end, engine_end = socket.socketpair()
    mover_end = _silent_mover(stack) if parts is None else parts.engine_end
    transfers = NoTransfers() if parts is None else SharedTransfers()
    if parts is not None:
        os.ftruncate(parts.pool_fd, num_blocks * layout.block_bytes)
    front: Link[Message] = Link(engine_end, FromFrontToEngine)
    mover: Link[Message] = Link(mover_end, FromMoverToEngine)
    engine = SimEngine(await AsyncLink.open(front_end, FromEngineToFront))
    stack.push_async_callback(engine.end)
    runner = SimRunner(times, model.words)
    engine.start(EngineLoop(core, runner, front, mover, transfers=transfers), front, mover_end)
    context, slots = limits.scheduler.max_context, 0 if parts is None else num_blocks
    return engine, _ready(settings, source, model, layout, context, num_blocks, times, transfer_slots=slots)


def _silent_mover(stack: AsyncExitStack) -> socket.socket:
    """The loop waits on a mover's link as well; the other end stays open and says nothing."""
    mover_end, silent_end = socket.socketpair()
    stack.callback(silent_end.close)
    return mover_end


def _ready(
    settings: WorkerSettings,
    source: ModelSource,
    model: SimModel,
    layout: KvLayout,
    context: int,
    num_blocks: int,
    times: TimeModel,
    *,
    transfer_slots: int,
) -> EngineReady:
    return EngineReady(
        model_digest=sim_digest(source, model, context, settings),
        dtype=settings.dtype,
        kv_dtype=layout.dtype,
        weight_format="simulated",
        vocab_size=model.shape.vocab_size,
        context_length=context,
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        prefill_tokens_per_s=times.prefill_tokens_per_s,
        decode_step_s=times.step_s(0, 1),
        block_shape=list(layout.block_shape),
        transfer_slots=transfer_slots,
        memory=_no_memory(layout, num_blocks, context),
    )


def sim_digest(source: ModelSource, model: SimModel, context: int, settings: WorkerSettings) -> bytes:
    """16 bytes that no real replica has and that simulated ones of one artifact and context share."""
    parts = [
        (_TAG_SIMULATED, settings.dtype.encode()),
        (_TAG_TOKENIZER, tokenizer_digest(source)),
        (_TAG_SHAPE, repr((model.shape, context)).encode()),
        # Release 0.1.0 had a setting here: without it, its simulated workers are of another model than ours.
        (_TAG_NOTHING, b""),
    ]
    return blake2b(tagged(parts), digest_size=_DIGEST_BYTES).digest()


def _no_memory(layout: KvLayout, num_blocks: int, context: int) -> MemoryFigures:
    """Nothing is allocated; what the pool would hold is told all the same."""
    return MemoryFigures(
        device="simulated",
        total_bytes=0,
        weight_bytes=0,
        reserve_bytes=0,
        kv_bytes=0,
        block_bytes=layout.block_bytes,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * BLOCK_TOKENS,
        staging_bytes=0,
        adapter_bytes=0,
        max_context=context,
        largest_context=min(context, num_blocks * BLOCK_TOKENS),
        unused_bytes=0,
    )
