"""Has adapters loaded, and puts them into the decoder's slots between steps.

An adapter is read, checked against the digest that it is asked for by, and brought into the decoder's form beside the
loop; the loop's thread then stores one address. A slot changes only while nobody holds it (residency.py), so that no
step sees another adapter than its sequences have. When its size is known, it waits until those that are held leave room
for it (`max_bytes`), as long as anybody wants it and one at a time; whoever wants another that finds none is sent
elsewhere. So is at once, while all threads that load hang, whoever wants one that is not there: nothing gives way for
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from services.common.adapter_files import InvalidAdapter
from services.worker.adapters.residency import Residency
from services.worker.adapters.source import AdapterFigures, AdapterRef
from services.worker.engine.adapter_loads import AdapterLoads, Loaded
from services.worker.engine.failed_adapters import RememberedFailures
from services.worker.errors import Refused
from services.worker.model.adapter import AdapterTable, PreparedAdapter, load_adapter
from services.worker.model.config import ModelConfig

# Of the expected time of a load, what one more changes; before the first, so long is assumed.
_WEIGHT_OF_NEWEST = 0.2
_ASSUMED_LOAD_S = 0.1
_SHOWN_DIGITS = 12
# With this code the gateway asks for other workers first.
_FULL = Refused("FAILED_PRECONDITION", "the adapters of others leave no memory for the request's")
_STUCK = Refused("FAILED_PRECONDITION", "no further adapter can be loaded: files of others cannot be read")
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Read:
    """An adapter that has been read for a slot, which took `seconds`."""

    slot: int
    adapter: AdapterRef
    prepared: PreparedAdapter
    seconds: float


class Adapters:
    """An AdapterSource."""

    def __init__(
        self,
        table: AdapterTable,
        load: Callable[[AdapterRef], PreparedAdapter],
        *,
        max_waiting: int,
        max_wait_s: float,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """load: gives the adapter as `table` prepares it, on another thread; raises InvalidAdapter.

        max_wait_s: for a slot or a load. max_bytes: of all that are resident.
        """
        self._table = table
        self._load = load
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._residency = Residency(table.num_slots, max_waiting=max_waiting, max_bytes=max_bytes)
        self._loading = AdapterLoads(self._timed, most_s=max_wait_s)
        # It waits for memory.
        self._homeless: _Read | None = None
        # Of the requests that have not ended.
        self._wanted: dict[int, AdapterRef] = {}
        # Told by the next `take`.
        self._refused: list[tuple[int, Refused]] = []
        self._loads = self._failures = self._waits = 0
        self._load_seconds = 0.0
        self._load_s = _ASSUMED_LOAD_S

    @property
    def is_settled(self) -> bool:
        """See AdapterSource."""
        return self._residency.is_settled and not self._refused

    @property
    def figures(self) -> AdapterFigures:
        """See AdapterSource."""
        residency = self._residency
        return AdapterFigures(
            resident=residency.resident,
            idle=0 if self._loading.is_stuck else residency.num_open,
            loads=self._loads,
            load_seconds=self._load_seconds,
            failures=self._failures,
            evictions=residency.evictions,
            waits=self._waits,
            waiting=residency.num_waiting + len(self._short_of_memory),
            load_s=self._load_s,
            resident_bytes=residency.resident_bytes,
            stalls=self._loading.stalls,
        )

    def has_room(self, adapter: AdapterRef) -> bool:
        """See AdapterSource."""
        return self._residency.has_room(adapter.digest)

    def begin(self, key: int, adapter: AdapterRef, now: float) -> None:
        """See AdapterSource."""
        if self._loading.is_stuck and not self._residency.has_slot(adapter.digest):
            self._refused.append((key, _STUCK))
            return
        before = self._residency.num_waiting
        self._wanted[key] = adapter
        self._residency.ask(key, adapter.digest, now)
        self._waits += self._residency.num_waiting > before
        self._start_loads(now)

    def take(self, now: float) -> Sequence[tuple[int, int | Refused]]:
        """See AdapterSource."""
        outcomes: list[tuple[int, int | Refused]] = [*self._refused]
        self._refused.clear()
        if self._homeless is not None:
            outcomes += self._house(self._homeless)
        for slot, adapter, loaded in self._loading.take(now):
            outcomes += self._settle(slot, adapter, loaded)
        short = self._short_of_memory
        late = Refused("RESOURCE_EXHAUSTED", "no place for the request's adapter has become free in time")
        outcomes += [(key, _FULL if key in short else late) for key in self._residency.late(now, self._max_wait_s)]
        if self._loading.is_stuck:
            outcomes += [(key, _STUCK) for key in self._residency.drop_absent()]
        self._residency.serve(now)
        outcomes += self._residency.take_granted()
        self._start_loads(now)
        return outcomes

    def waits_for_place(self, key: int) -> bool:
        """See AdapterSource."""
        return self._residency.waits(key) or key in self._short_of_memory

    def release(self, key: int) -> None:
        """See AdapterSource."""
        if self._wanted.pop(key, None) is not None:
            self._residency.release(key)

    @property
    def _short_of_memory(self) -> set[int]:
        """Requests whose adapter waits for memory."""
        return set() if self._homeless is None else self._residency.holders(self._homeless.slot)

    def _settle(self, slot: int, adapter: AdapterRef, loaded: Future[Loaded]) -> list[tuple[int, int | Refused]]:
        """A load has ended; those who get nothing of it."""
        try:
            prepared, seconds = loaded.result()
        except Exception as error:
            self._failures += 1
            told = _log.warning if isinstance(error, InvalidAdapter) else _log.exception
            told("an adapter could not be loaded", adapter=_shown(adapter), reason=str(error))
            refused = Refused("FAILED_PRECONDITION", f"the request's adapter cannot be loaded: {_line(error)}")
            return [(key, refused) for key in self._residency.failed(slot)]
        return self._house(_Read(slot, adapter, prepared, seconds))

    def _house(self, read: _Read) -> list[tuple[int, int | Refused]]:
        """Put an adapter into its slot where there is memory for it; those who get nothing of it otherwise."""
        emptied = self._residency.make_room(read.prepared.num_bytes)
        if emptied is None and self._may_wait(read):
            return []
        if read is self._homeless:
            self._homeless = None
        if emptied is None:
            keys = self._residency.failed(read.slot)
            self._failures += bool(keys)
            _log.warning(
                "an adapter has no room",
                adapter=_shown(read.adapter),
                bytes=read.prepared.num_bytes,
                requests=len(keys),
            )
            return [(key, _FULL) for key in keys]
        for number in emptied:
            self._table.put(number, None)
        self._table.put(read.slot, read.prepared)
        self._residency.loaded(read.slot, read.prepared.num_bytes)
        self._loads += 1
        self._load_seconds += read.seconds
        self._load_s += _WEIGHT_OF_NEWEST * (read.seconds - self._load_s)
        _log.info("adapter loaded", adapter=_shown(read.adapter), slot=read.slot, seconds=round(read.seconds, 4))
        return []

    def _may_wait(self, read: _Read) -> bool:
        """Whether an adapter waits for memory: the only one that does, and as long as it is wanted."""
        holders = self._residency.holders(read.slot)
        if self._homeless is None and holders:
            self._homeless = read
            self._waits += len(holders)
            _log.info("an adapter waits for memory", adapter=_shown(read.adapter), bytes=read.prepared.num_bytes)
        return read is self._homeless and bool(holders)

    def _start_loads(self, now: float) -> None:
        for load in self._residency.take_loads():
            self._table.put(load.slot, None)
            self._loading.begin(load.slot, self._wanted[load.key], now)

    def _timed(self, adapter: AdapterRef) -> Loaded:
        started_s = self._clock()
        prepared = self._load(adapter)
        return prepared, self._clock() - started_s


def adapter_loader(
    table: AdapterTable, config: ModelConfig, dtype: torch.dtype, *, max_rank: int, max_bytes: int
) -> Callable[[AdapterRef], PreparedAdapter]:
    """Reads an adapter's folder for a model, and checks that it is the one that is meant and has room alone."""

    def load(adapter: AdapterRef) -> PreparedAdapter:
        weights = load_adapter(Path(adapter.path), config, dtype, max_rank=max_rank, max_bytes=max_bytes)
        if weights.digest != adapter.digest:
            raise InvalidAdapter("the folder holds another adapter than the one that was registered")
        prepared = table.prepare(weights)
        if prepared.num_bytes > max_bytes:
            raise InvalidAdapter(f"it takes {prepared.num_bytes} bytes: no more than {max_bytes} have room")
        return prepared

    return RememberedFailures(load)


def _shown(adapter: AdapterRef) -> str:
    return adapter.digest.hex()[:_SHOWN_DIGITS]


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if isinstance(error, InvalidAdapter) else type(error).__name__
