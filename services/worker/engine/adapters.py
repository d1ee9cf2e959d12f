"""Loads adapters on threads of their own, and puts them into the decoder's slots between steps.

An adapter is read, checked against the digest that it is asked for by, and brought into the decoder's form beside the
loop; the loop's thread then stores one address. A slot changes only while nobody holds it (residency.py), so that no
step sees another adapter than its sequences have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import structlog
import torch

from services.common.adapter_files import InvalidAdapter
from services.worker.adapters.residency import Residency
from services.worker.adapters.source import AdapterFigures, AdapterRef
from services.worker.errors import Refused
from services.worker.model.adapter import AdapterTable, load_adapter
from services.worker.model.config import ModelConfig

# One file that does not come must not keep the others waiting.
_THREADS = 2
# Of the expected time of a load, what one more changes; before the first, so long is assumed.
_WEIGHT_OF_NEWEST = 0.2
_ASSUMED_LOAD_S = 0.1
_SHOWN_DIGITS = 12
_log = structlog.get_logger()
# The adapter in the decoder's form, and the seconds that took.
Loaded = tuple[object, float]


class Adapters:
    """An AdapterSource."""

    def __init__(
        self,
        table: AdapterTable,
        load: Callable[[AdapterRef], object],
        *,
        max_waiting: int,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """load: gives the adapter as `table` prepares it, on another thread; raises InvalidAdapter."""
        self._table = table
        self._load = load
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._residency = Residency(table.num_slots, max_waiting=max_waiting)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="adapters")
        self._loading: dict[int, tuple[AdapterRef, Future[Loaded]]] = {}
        # Of the requests that have not ended.
        self._wanted: dict[int, AdapterRef] = {}
        self._loads = self._failures = self._waits = 0
        self._load_seconds = 0.0
        self._load_s = _ASSUMED_LOAD_S

    @property
    def is_settled(self) -> bool:
        """See AdapterSource."""
        return self._residency.is_settled

    @property
    def figures(self) -> AdapterFigures:
        """See AdapterSource."""
        residency = self._residency
        return AdapterFigures(
            resident=residency.resident,
            idle=residency.num_idle,
            loads=self._loads,
            load_seconds=self._load_seconds,
            failures=self._failures,
            evictions=residency.evictions,
            waits=self._waits,
            waiting=residency.num_waiting,
            load_s=self._load_s,
        )

    def has_room(self, adapter: AdapterRef) -> bool:
        """See AdapterSource."""
        return self._residency.has_room(adapter.digest)

    def begin(self, key: int, adapter: AdapterRef, now: float) -> None:
        """See AdapterSource."""
        before = self._residency.num_waiting
        self._wanted[key] = adapter
        self._residency.ask(key, adapter.digest, now)
        self._waits += self._residency.num_waiting > before
        self._start_loads()

    def take(self, now: float) -> Sequence[tuple[int, int | Refused]]:
        """See AdapterSource."""
        outcomes: list[tuple[int, int | Refused]] = []
        for slot in [slot for slot, (_, future) in self._loading.items() if future.done()]:
            outcomes += self._settle(slot)
        late = Refused("RESOURCE_EXHAUSTED", "no place for the request's adapter has become free in time")
        outcomes += [(key, late) for key in self._residency.late(now, self._max_wait_s)]
        self._residency.serve(now)
        outcomes += self._residency.take_granted()
        self._start_loads()
        return outcomes

    def waits_for_place(self, key: int) -> bool:
        """See AdapterSource."""
        return self._residency.waits(key)

    def release(self, key: int) -> None:
        """See AdapterSource."""
        if self._wanted.pop(key, None) is not None:
            self._residency.release(key)

    def close(self) -> None:
        """End the threads; what is being loaded is loaded in vain."""
        self._threads.shutdown(cancel_futures=True)

    def _settle(self, slot: int) -> list[tuple[int, int | Refused]]:
        """A load has ended; those who get nothing of it."""
        adapter, future = self._loading.pop(slot)
        digest = adapter.digest.hex()[:_SHOWN_DIGITS]
        try:
            prepared, seconds = future.result()
        except Exception as error:
            self._failures += 1
            told = _log.warning if isinstance(error, InvalidAdapter) else _log.exception
            told("an adapter could not be loaded", adapter=digest, reason=str(error))
            refused = Refused("FAILED_PRECONDITION", f"the request's adapter cannot be loaded: {_line(error)}")
            return [(key, refused) for key in self._residency.failed(slot)]
        self._table.put(slot, prepared)
        self._residency.loaded(slot)
        self._loads += 1
        self._load_seconds += seconds
        self._load_s += _WEIGHT_OF_NEWEST * (seconds - self._load_s)
        _log.info("adapter loaded", adapter=digest, slot=slot, seconds=round(seconds, 4))
        return []

    def _start_loads(self) -> None:
        for load in self._residency.take_loads():
            self._table.put(load.slot, None)
            adapter = self._wanted[load.key]
            self._loading[load.slot] = adapter, self._threads.submit(self._timed, adapter)

    def _timed(self, adapter: AdapterRef) -> Loaded:
        started_s = self._clock()
        prepared = self._load(adapter)
        return prepared, self._clock() - started_s


def adapter_loader(
    table: AdapterTable, config: ModelConfig, dtype: torch.dtype, max_rank: int
) -> Callable[[AdapterRef], object]:
    """Reads an adapter's folder for a model, and checks that it is the one that is meant."""

    def load(adapter: AdapterRef) -> object:
        weights = load_adapter(Path(adapter.path), config, dtype, max_rank=max_rank)
        if weights.digest != adapter.digest:
            raise InvalidAdapter("the folder holds another adapter than the one that was registered")
        return table.prepare(weights)

    return load


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if isinstance(error, InvalidAdapter) else type(error).__name__
