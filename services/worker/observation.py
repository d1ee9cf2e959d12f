"""What the worker's front records: metrics of load and usage, and the spans of a request made from its timings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation

from services.worker.adapters.source import AdapterFigures
from services.worker.engine_messages import EngineLoad
from services.worker.load_board import LoadBoard
from services.worker.messages import MoveReason, RequestAborted, RequestUsage
from services.worker.mover_messages import MoverCounters

_meter = metrics.get_meter("kvmesh.worker")
_tracer = trace.get_tracer("kvmesh.worker")


class WorkerMetrics:
    """Instruments of one worker; gauges read the board, counters are told."""

    def __init__(self, board: LoadBoard) -> None:
        self.mover = MoverCounters(0, 0, 0, 0, 0, 0, 0)
        self._board = board
        self._prompt_tokens = _meter.create_counter(
            "kvmesh_prompt_tokens", description="Prompt tokens of requests served."
        )
        self._cached_tokens = _meter.create_counter(
            "kvmesh_cached_prompt_tokens",
            description="Prompt tokens not computed, by the tier that held them.",
        )
        self._output_tokens = _meter.create_counter("kvmesh_output_tokens", description="Tokens generated.")
        self._requests = _meter.create_counter("kvmesh_worker_requests", description="Requests by outcome.")
        self._moves_wanted = _meter.create_counter(
            "kvmesh_worker_moves_wanted", description="Attempts whose readers were asked to move them, by reason."
        )
        self._queue_s = _meter.create_histogram("kvmesh_worker_queue_seconds", description="Arrival to first step.")
        self._pull_s = _meter.create_histogram(
            "kvmesh_worker_pull_seconds", description="Pulls of a request, by the slowest tier."
        )
        self._prefill_s = _meter.create_histogram("kvmesh_worker_prefill_seconds", description="First step to its end.")
        for name, read in _LOAD_GAUGES.items():
            _meter.create_observable_gauge(name, callbacks=[self._load_gauge(read)])
        for name, read_total in _LOAD_TOTALS.items():
            _meter.create_observable_counter(name, callbacks=[self._load_gauge(read_total)])
        _meter.create_observable_counter(
            "kvmesh_worker_pulls_skipped",
            callbacks=[lambda _: self._skipped()],
            description="Planned pulls that did not begin, by reason.",
        )
        _meter.create_observable_counter(
            "kvmesh_worker_staging_waits",
            callbacks=[self._by_use(lambda load: load.staging_waits)],
            description="Transfers that waited for room in the staging area, by use.",
        )
        _meter.create_observable_counter(
            "kvmesh_worker_staging_short_blocks",
            callbacks=[self._by_use(lambda load: load.staging_short_blocks)],
            description="Blocks that were not transferred for want of room in the staging area, by use.",
        )
        for name, read_adapters in _ADAPTER_GAUGES.items():
            _meter.create_observable_gauge(name, callbacks=[self._of_adapters(read_adapters)])
        for name, read_adapters in _ADAPTER_TOTALS.items():
            _meter.create_observable_counter(name, callbacks=[self._of_adapters(read_adapters)])
        for name, read_mover in _MOVER_TOTALS.items():
            _meter.create_observable_counter(name, callbacks=[self._mover_total(read_mover)])
        for name, read_now in _MOVER_GAUGES.items():
            _meter.create_observable_gauge(name, callbacks=[self._mover_total(read_now)])
        _meter.create_observable_counter(
            "kvmesh_mover_transport_bytes",
            callbacks=[lambda _: [Observation(n, {"transport": t}) for t, n in self.mover.bytes_by_transport.items()]],
            description="Payload pulled, by transport.",
        )

    def finished(self, usage: RequestUsage) -> None:
        """A request has run to its end."""
        self._requests.add(1, {"outcome": "completed"})
        self.served(usage)

    def served(self, usage: RequestUsage) -> None:
        """What was done for a request, whether or not its reader stayed to the end."""
        self._prompt_tokens.add(usage.prompt_tokens)
        self._output_tokens.add(usage.output_tokens - usage.known_tokens)
        for tier, tokens in cached_by_tier(usage).items():
            self._cached_tokens.add(tokens, {"tier": tier})
        self._queue_s.record(usage.queue_s)
        self._prefill_s.record(usage.prefill_s)
        if usage.pull_s:
            self._pull_s.record(usage.pull_s, {"tier": slowest_tier(usage)})

    def ended(self, outcome: str) -> None:
        """A request has ended in another way: "stale", "cancelled" or a status name in lower case."""
        self._requests.add(1, {"outcome": outcome})

    def move_wanted(self, reason: MoveReason) -> None:
        """A reader is asked to move its attempt."""
        self._moves_wanted.add(1, {"reason": reason})

    def _skipped(self) -> list[Observation]:
        load = self._board.load
        return [Observation(count, {"reason": reason}) for reason, count in load.pulls_skipped.items()] if load else []

    def _by_use(
        self, read: Callable[[EngineLoad], dict[str, int]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            load = self._board.load
            return [Observation(count, {"use": use}) for use, count in read(load).items()] if load else []

        return observe

    def _load_gauge(self, read: Callable[[EngineLoad], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(read(self._board.load))] if self._board.load else []

    def _of_adapters(
        self, read: Callable[[AdapterFigures], float]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            load = self._board.load
            return [Observation(read(load.adapters))] if load and load.adapters else []

        return observe

    def _mover_total(self, read: Callable[[MoverCounters], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(read(self.mover))]


_LOAD_GAUGES: dict[str, Callable[[EngineLoad], float]] = {
    "kvmesh_worker_running_requests": lambda load: load.running_requests,
    "kvmesh_worker_waiting_requests": lambda load: load.waiting_requests,
    "kvmesh_worker_queued_prefill_tokens": lambda load: load.queued_prefill_tokens,
    "kvmesh_worker_decoding_sequences": lambda load: load.decoding_sequences,
    "kvmesh_worker_free_blocks": lambda load: load.free_blocks - load.cached_blocks,
    "kvmesh_worker_cached_blocks": lambda load: load.cached_blocks,
    "kvmesh_worker_referenced_blocks": lambda load: load.referenced_blocks,
    "kvmesh_worker_held_requests": lambda load: load.held_requests,
    "kvmesh_worker_pins": lambda load: load.pins,
    "kvmesh_worker_prefill_tokens_per_s": lambda load: load.prefill_tokens_per_s,
    "kvmesh_worker_decode_step_s": lambda load: load.decode_step_s,
}
_LOAD_TOTALS: dict[str, Callable[[EngineLoad], float]] = {
    "kvmesh_worker_preemptions": lambda load: load.preemptions,
    "kvmesh_worker_pushes_dropped": lambda load: load.pushes_dropped,
    "kvmesh_worker_pushes_deferred": lambda load: load.pushes_deferred,
    "kvmesh_worker_pulls_cut": lambda load: load.pulls_cut,
    "kvmesh_worker_drafted_tokens": lambda load: load.drafted_tokens,
    "kvmesh_worker_accepted_tokens": lambda load: load.accepted_tokens,
    "kvmesh_worker_loop_turns": lambda load: load.progress,
}
_ADAPTER_GAUGES: dict[str, Callable[[AdapterFigures], float]] = {
    "kvmesh_worker_resident_adapters": lambda adapters: len(adapters.resident),
    "kvmesh_worker_resident_adapter_bytes": lambda adapters: adapters.resident_bytes,
    "kvmesh_worker_adapter_waiting_requests": lambda adapters: adapters.waiting,
}
_ADAPTER_TOTALS: dict[str, Callable[[AdapterFigures], float]] = {
    "kvmesh_worker_adapter_loads": lambda adapters: adapters.loads,
    "kvmesh_worker_adapter_load_seconds": lambda adapters: adapters.load_seconds,
    "kvmesh_worker_adapter_load_failures": lambda adapters: adapters.failures,
    "kvmesh_worker_adapter_stalls": lambda adapters: adapters.stalls,
    "kvmesh_worker_adapter_evictions": lambda adapters: adapters.evictions,
    "kvmesh_worker_adapter_waits": lambda adapters: adapters.waits,
}
_MOVER_GAUGES: dict[str, Callable[[MoverCounters], int]] = {
    "kvmesh_mover_running_pulls": lambda counters: counters.running_pulls,
    "kvmesh_mover_queued_pushes": lambda counters: counters.queued_pushes,
    "kvmesh_mover_open_leases": lambda counters: counters.open_leases,
}
_MOVER_TOTALS: dict[str, Callable[[MoverCounters], int]] = {
    "kvmesh_mover_pulled_blocks": lambda counters: counters.pulled_blocks,
    "kvmesh_mover_pulled_bytes": lambda counters: counters.pulled_bytes,
    "kvmesh_mover_failed_pulls": lambda counters: counters.failed_pulls,
    "kvmesh_mover_verification_failures": lambda counters: counters.verification_failures,
    "kvmesh_mover_pushed_blocks": lambda counters: counters.pushed_blocks,
    "kvmesh_mover_dropped_pushes": lambda counters: counters.dropped_pushes,
    "kvmesh_mover_served_blocks": lambda counters: counters.served_blocks,
}


def cached_by_tier(usage: RequestUsage) -> dict[str, int]:
    """Prompt tokens that were not computed, by tier."""
    return {
        "local": usage.cached_local,
        "peer": usage.cached_peer,
        "ram": usage.cached_ram,
        "ssd": usage.cached_ssd,
    }


def slowest_tier(usage: RequestUsage) -> str:
    """Where the pulled blocks of a request came from; the slowest where there are several, "none" if none came."""
    cached = cached_by_tier(usage)
    return next((tier for tier in ("ssd", "ram", "peer") if cached[tier]), "none")


def record_spans(usage: RequestUsage, *, parent: Context, submitted_ns: int, ended_ns: int) -> None:
    """Spans queue, prefill and decode under the request's trace, in this order; the mover makes that of a pull."""
    at_ns = min(submitted_ns + int(usage.pull_s * 1e9), ended_ns)
    for name, seconds in (("queue", usage.queue_s), ("prefill", usage.prefill_s)):
        end_ns = min(at_ns + int(seconds * 1e9), ended_ns)
        _span(name, parent, at_ns, end_ns, _attributes(name, usage))
        at_ns = end_ns
    _span("decode", parent, at_ns, ended_ns, _attributes("decode", usage))


def record_aborted_spans(aborted: RequestAborted) -> None:
    """The same for a request whose reader has gone, as of now."""
    ended_ns = time.time_ns()
    parent = propagate.extract({"traceparent": aborted.traceparent}, Context())
    submitted_ns = ended_ns - int(aborted.age_s * 1e9)
    record_spans(aborted.usage, parent=parent, submitted_ns=submitted_ns, ended_ns=ended_ns)


def _span(name: str, parent: Context, start_ns: int, end_ns: int, attributes: dict[str, int]) -> None:
    _tracer.start_span(name, context=parent, start_time=start_ns, attributes=attributes).end(end_time=end_ns)


def _attributes(name: str, usage: RequestUsage) -> dict[str, int]:
    if name == "prefill":
        cached = sum(cached_by_tier(usage).values())
        return {"gen_ai.usage.input_tokens": usage.prompt_tokens, "kvmesh.cached_tokens": cached}
    return {"gen_ai.usage.output_tokens": usage.output_tokens} if name == "decode" else {}
