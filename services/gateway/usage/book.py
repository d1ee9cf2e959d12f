"""Counts what clients were told that they used, and tells Redis once a second.

A request is counted when it ends, with the usage that its answer states. Requests with an idempotency key are counted
by run: what any reader of it was told beyond what was counted before. A gateway that is killed loses what was running
and what ended in its last second; without a file also what Redis had not heard. While Redis does not answer, counts are
kept and sent later.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import structlog
from opentelemetry import metrics

from services.common.keys import KeySpace
from services.common.lua import LuaScript
from services.common.redis_client import REDIS_ERRORS, RedisClient
from services.common.usage import ACCELERATOR_UNIT, COST_UNIT, FIGURES, KEEP_DAYS, Usage, UsageKey, field_of
from services.gateway.usage.file import load_ledger, save_ledger
from services.gateway.usage.ledger import Batch, LedgerState, UsageLedger, WaitingRun
from services.gateway.usage.prices import Prices

_EVERY_S = 1.0
_KEEP_S = KEEP_DAYS * 24 * 3600
# Runs with an idempotency key that wait to be counted; beyond it the oldest is counted as if it had none.
_MAX_RUNS = 4096
# What was charged of a run is known for as long as a repeat of it can come, a day and the life of a request.
_RUN_KEEP_S = 2 * 24 * 3600
_CLOSE_S = 2.0
_ADD = LuaScript("add_usage")
_CHARGE = LuaScript("charge_run")
_log = structlog.get_logger("gateway.usage")
_meter = metrics.get_meter("kvmesh.gateway")
_prompt = _meter.create_counter(
    "kvmesh_gateway_prompt_tokens", description="Prompt tokens of requests that were placed, by tenant."
)
_output = _meter.create_counter(
    "kvmesh_gateway_output_tokens", description="Output tokens of client requests, by tenant."
)
_cached = _meter.create_counter(
    "kvmesh_gateway_cached_tokens", description="Prompt tokens that were not computed, by tenant, model and tier."
)
_accelerator = _meter.create_counter(
    "kvmesh_gateway_accelerator_seconds", description="Time of engines' steps, by tenant and model."
)
_cost = _meter.create_counter("kvmesh_gateway_cost", description="By the price table, in its currency.")
_failures = _meter.create_counter(
    "kvmesh_gateway_usage_failures", description="Batches of usage that did not get through."
)


class UsageBook:
    """`run` until cancelled, then `close`."""

    def __init__(self, client: RedisClient, prices: Prices, path: Path | None) -> None:
        """path: a file that keeps what was counted. Raises ConfigurationError when it means nothing."""
        self.prices = prices
        self.ledger = UsageLedger(load_ledger(path))
        self._client = client
        # Runs of this process are told from those of the one before it, whose ledger goes on.
        self._life = secrets.token_hex(8)
        self._path = path
        self._keys = KeySpace().usage()
        self._num_runs = 0
        self._is_away = False
        self._saved_revision = 0
        self._saving = Lock()

    @property
    def num_untold(self) -> int:
        """Requests that Redis has not been told of."""
        return self.ledger.untold.requests + self.ledger.num_runs

    def count(self, tenant: str, model: str, usage: Usage, *, run: str = "") -> None:
        """A request has ended; usage: without its cost. run: of a request with an idempotency key."""
        cost_nano = self.prices.of(model, time.monotonic()).cost_nano(usage)
        usage += Usage(cost_nano=cost_nano)
        key = UsageKey(datetime.now(UTC).date().isoformat(), tenant, model)
        if not run:
            self._add(key, usage)
            return
        if self.ledger.num_runs >= _MAX_RUNS:
            oldest = self.ledger.take_run()
            self._add(oldest.key, oldest.usage)
        self._num_runs += 1
        self.ledger.put_off(WaitingRun(run, f"{self._life}:{self._num_runs}", key, usage))

    async def run(self) -> None:
        """Tell Redis and the file, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._flush()

    async def close(self) -> None:
        """Tell what is left, for a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._flush()
        await self._save()

    async def _flush(self) -> None:
        try:
            while (run := self.ledger.first_run) is not None:
                await self._charge(run)
            self.ledger.drop_before((datetime.now(UTC) - timedelta(KEEP_DAYS)).date().isoformat())
            batch = self.ledger.batch()
            await self._save()
            if batch is not None:
                await self._send(batch)
            self._answered()
        except REDIS_ERRORS as error:
            _failures.add(1)
            await self._save()
            self._lost(error)

    async def _charge(self, run: WaitingRun) -> None:
        """Count of a run what was not counted before."""
        tag = blake2b(run.run.encode(), digest_size=16).hexdigest()
        arguments = [argument for pair in zip(FIGURES, run.usage.figures(), strict=True) for argument in pair]
        added = await _CHARGE(self._client, [self._keys.run(tag)], [_RUN_KEEP_S, run.question, *arguments])
        if self.ledger.first_run is run:
            # Else it has given way to others meanwhile, and was counted.
            self.ledger.take_run()
            self._add(run.key, Usage(*map(int, added)))

    async def _send(self, batch: Batch) -> None:
        days = sorted({key.day for key, _ in batch.rows})
        arguments: list[str | bytes | int] = [batch.number, int(batch.is_whole), _KEEP_S]
        for key, usage in batch.rows:
            for figure, amount in zip(FIGURES, usage.figures(), strict=True):
                if amount:
                    arguments += (days.index(key.day) + 2, field_of(key, figure), amount)
        keys = [self._keys.ledger(self.ledger.id), *map(self._keys.day, days)]
        if await _ADD(self._client, keys, arguments):
            self.ledger.arrived()
        else:
            _log.warning("usage_forgotten", detail="redis gets all that was counted here")
            self.ledger.forgotten()

    def _add(self, key: UsageKey, usage: Usage) -> None:
        if not usage:
            return
        self.ledger.add(key, usage)
        labels = {"tenant": key.tenant, "model": key.model}
        _prompt.add(usage.prompt_tokens, labels)
        _output.add(usage.output_tokens, labels)
        _accelerator.add(usage.accelerator_us / ACCELERATOR_UNIT, labels)
        _cost.add(usage.cost_nano / COST_UNIT, labels)
        for tier in ("local", "peer", "ram", "ssd"):
            if tokens := getattr(usage, f"cached_{tier}"):
                _cached.add(tokens, {**labels, "tier": tier})

    async def _save(self) -> None:
        """Write the file where anything is new. A file that cannot be written means that a restart may forget."""
        ledger = self.ledger
        if self._path is None or ledger.revision == self._saved_revision:
            return
        try:
            await asyncio.to_thread(self._write, self._path, ledger.revision, ledger.state)
        except OSError as error:
            _log.error("usage is not kept", path=str(self._path), error=error.strerror)

    def _write(self, path: Path, revision: int, state: LedgerState) -> None:
        """In a thread: one whose caller was cancelled may still be at it, and the file is never to go back to that."""
        with self._saving:
            if revision > self._saved_revision:
                save_ledger(path, state)
                self._saved_revision = revision

    def _answered(self) -> None:
        if self._is_away:
            self._is_away = False
            _log.info("usage_told", detail="redis answers again")

    def _lost(self, error: BaseException) -> None:
        if not self._is_away:
            self._is_away = True
            _log.warning("usage_kept", detail="redis does not answer; it is told later", error=type(error).__name__)
