"""One run: requests arrive, the router decides, workers compute. Deterministic; all time is simulated.

The gateway is plain: what the router calls OVERLOADED waits in a fair queue, whose first asks again when something
ends or after a pause; any other refusal is final. A worker whose state no longer fits answers STALE, and
the request joins the line. When a worker dies its requests are placed again, with the tokens they have so far as part
of their prompt, once its silence has lasted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from services.common.blocks import BlockId
from services.router.admission import AdmissionConfig
from services.router.domain import Ask, AttemptId, Placement, RefusalReason, Refused
from services.router.placement import PlacementConfig
from services.router.policies import POLICIES
from services.router.roll_call import SUSPECT_S
from services.router.simulator import oracle
from services.router.simulator.events import Events
from services.router.simulator.gateway_line import GatewayLine
from services.router.simulator.introductions import MODEL, MODEL_DIGEST
from services.router.simulator.job import Job
from services.router.simulator.lower_tiers import LowerTiers, Pull, number_of
from services.router.simulator.mesh_view import MeshView
from services.router.simulator.oracle import Oracle
from services.router.simulator.reports import PeriodicReports
from services.router.simulator.scenario import Outcome, Scenario
from services.router.simulator.sessions import Sessions
from services.router.simulator.trace import Trace
from services.router.simulator.worker import SimWorker

_RETRY_S = 0.05
# What clients allow an answer; nobody knows beforehand how long it will be.
_MAX_OUTPUT_TOKENS = 2048


class Simulation:
    """`run` once."""

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        self._scenario = scenario
        self._random = Random(scenario.seed)
        config = PlacementConfig(scenario.policy, AdmissionConfig(scenario.max_queue_s))
        self.workers = [SimWorker(scenario.profile) for _ in range(scenario.num_workers)]
        self._oracle = Oracle(self.workers) if scenario.policy == oracle.NAME else None
        policies, delays = POLICIES, scenario.delays
        if self._oracle is not None:
            policies = {**POLICIES, oracle.NAME: self._oracle.score}
            delays = replace(delays, report_s=0.0, index_s=0.0)
        tiers = scenario.lower_tiers
        self._view = MeshView(config, scenario.profile, scenario.num_workers, delays, policies, lower_tiers=tiers)
        self._tiers = LowerTiers(tiers, scenario.profile.block_tokens, self.workers) if tiers is not None else None
        if self._oracle is not None:
            self._oracle.numbers = self._view.numbers()
        self._alive = [True] * scenario.num_workers
        self._events = Events()
        self._reports = PeriodicReports(self._view, self.workers, self._alive, self._events, self._random)
        self._next_s = [math.inf] * scenario.num_workers
        self.outcomes = [Outcome(request, at, request.arrival_s) for at, request in enumerate(trace.requests)]
        self._sessions = Sessions(self.outcomes)
        self._arrived = 0
        self._line = GatewayLine(scenario.patience_s, place=self._place, refuse=self._refuse)
        self._line_timer = False

    def run(self) -> list[Outcome]:
        """Until every request has ended."""
        for outcome in self._sessions.first:
            self._events.at(outcome.arrived_s, self._arrival_of(outcome))
        self._events.run()
        return self.outcomes

    @property
    def _now_s(self) -> float:
        return self._events.now_s

    def _arrival_of(self, outcome: Outcome) -> Callable[[], None]:
        return lambda: self._arrive(outcome)

    def _arrive(self, outcome: Outcome) -> None:
        self._arrived += 1
        if self._scenario.lost_workers and self._arrived == (len(self.outcomes) + 1) // 2:
            self._lose_workers()
        if not self.workers[0].fits(outcome.request.prompt_tokens, outcome.request.output_tokens):
            self._refuse(outcome)
        elif not self._line.is_empty or not self._place(outcome):
            self._wait(outcome)

    def _wait(self, outcome: Outcome) -> None:
        self._line.join(outcome, self._now_s)
        self._start_line_timer()

    def _start_line_timer(self) -> None:
        if not self._line.is_empty and not self._line_timer:
            self._line_timer = True
            self._events.at(self._now_s + _RETRY_S, self._on_line_timer)

    def _on_line_timer(self) -> None:
        self._line_timer = False
        self._line.serve(self._now_s)
        self._start_line_timer()

    def _place(self, outcome: Outcome) -> bool:
        """Ask the router; False when the request has to wait."""
        outcome.attempts += 1
        ask = self._ask(outcome)
        if self._oracle is not None:
            self._tell_oracle(self._oracle, outcome.request.block_ids)
        answer = self._view.ask(ask, self._now_s)
        if isinstance(answer, Refused):
            if answer.reason is RefusalReason.OVERLOADED or outcome.output_tokens:
                return False
            self._refuse(outcome)
            return True
        outcome.granted_s = self._now_s
        outcome.predicted_tpot_s = answer.predicted_tpot_s
        if not outcome.predicted_ttft_s:
            outcome.predicted_ttft_s = self._now_s - outcome.arrived_s + answer.predicted_ttft_s
        self._send(outcome, ask.id, answer)
        return True

    def _tell_oracle(self, asked: Oracle, ids: tuple[BlockId, ...]) -> None:
        asked.look(ids, self._now_s)
        for number, worker in enumerate(self.workers):
            self._view.report(number, worker, self._now_s)

    def _ask(self, outcome: Outcome) -> Ask:
        request, scenario = outcome.request, self._scenario
        ttft_s, tpot_s = 0.0, 0.0
        if scenario.tells_objectives:
            left_s = scenario.ttft_objective_s - (self._now_s - outcome.arrived_s)
            ttft_s, tpot_s = 0.0 if outcome.output_tokens else max(1e-3, left_s), scenario.tpot_objective_s
        return Ask(
            id=AttemptId(f"r{outcome.index}", outcome.attempts),
            model=MODEL,
            model_digest=MODEL_DIGEST,
            block_ids=list(request.block_ids),
            prompt_tokens=request.prompt_tokens + outcome.output_tokens,
            max_output_tokens=_MAX_OUTPUT_TOKENS,
            ttft_objective_s=ttft_s,
            tpot_objective_s=tpot_s,
            resumes=outcome.output_tokens > 0,
        )

    def _send(self, outcome: Outcome, attempt: AttemptId, placement: Placement) -> None:
        number = self._view.number_of(placement)
        request = outcome.request
        job = Job(
            key=(outcome, attempt),
            prompt_tokens=request.prompt_tokens + outcome.output_tokens,
            output_tokens=request.output_tokens - outcome.output_tokens,
            block_ids=request.block_ids,
            coming=max((run.first_block + run.num_blocks for run in placement.pull_plan), default=0),
        )
        if self._oracle is not None:
            self._oracle.in_flight[number].append(job)
        self._events.at(self._now_s + self._scenario.delays.hop_s, lambda: self._reach(number, job, placement))

    def _reach(self, number: int, job: Job, placement: Placement) -> None:
        """The request is at its worker, which pulls before it counts it as its own."""
        outcome, attempt = _key(job)
        worker = self.workers[number]
        outcome.worker = number
        if self._alive[number] and worker.is_stale(job, placement.local_blocks):
            self._leave_flight(number, job)
            self._view.report(number, worker, self._now_s)
            self._view.done(attempt, self._now_s, outcome="stale")
            self._wait(outcome)
        elif self._alive[number] and placement.pull_plan and self._tiers is not None:
            pull = self._tiers.pull(placement.pull_plan, job.block_ids, self._now_s)
            for run in placement.pull_plan:
                if run.kind == "kvstore":
                    self._tell_node(number_of(run.location_id))
            self._events.at(pull.end_s, lambda: self._pulled(number, job, placement, pull))
        else:
            self._submit(number, job)

    def _pulled(self, number: int, job: Job, placement: Placement, pull: Pull) -> None:
        outcome, worker = _key(job)[0], self.workers[number]
        if self._alive[number]:
            worker.receive(job.block_ids[: pull.end])
            outcome.pulled_tokens = (pull.end - placement.pull_plan[0].first_block) * worker.profile.block_tokens
        self._submit(number, job)

    def _submit(self, number: int, job: Job) -> None:
        self._leave_flight(number, job)
        if self._alive[number]:
            self.workers[number].submit(job, self._now_s)
            self._after(number, admitted=(str(_key(job)[1]),))
        else:
            self._events.at(self._now_s + SUSPECT_S, lambda: self._rescue(job))

    def _leave_flight(self, number: int, job: Job) -> None:
        if self._oracle is not None:
            self._oracle.in_flight[number].remove(job)

    def _after(self, number: int, *, admitted: tuple[str, ...] = (), ended: tuple[str, ...] = ()) -> None:
        """A worker has changed: tell the router, and come back when it changes next."""
        worker = self.workers[number]
        if admitted or ended:
            self._view.report(number, worker, self._now_s, admitted=admitted, ended=ended)
        end_s = worker.end_s
        if end_s < math.inf and end_s != self._next_s[number]:
            self._next_s[number] = end_s
            self._events.at(end_s, lambda: self._step(number, end_s))
        self._reports.ensure(number)

    def _step(self, number: int, end_s: float) -> None:
        worker = self.workers[number]
        # A segment that was cut short has ended before, and its old end means nothing.
        if worker.end_s != end_s:
            return
        self._next_s[number] = math.inf
        advanced = worker.advance()
        self._view.announce(number, *worker.cache.take_changes(), self._now_s)
        for job, count in advanced.computed:
            self._write_behind(number, job.block_ids[:count])
        for job in advanced.first_tokens:
            outcome, _ = _key(job)
            if outcome.first_token_s < 0:
                outcome.first_token_s = self._now_s + self._scenario.delays.hop_s
                outcome.cached_tokens = job.hit_blocks * worker.profile.block_tokens
        ended = tuple(str(_key(job)[1]) for job in advanced.finished)
        self._after(number, ended=ended)
        for job in advanced.finished:
            self._finish(job)

    def _write_behind(self, number: int, ids: tuple[BlockId, ...]) -> None:
        if self._tiers is not None:
            there_s = self._tiers.write(number, ids, self._now_s)
            if there_s < math.inf:
                self._events.at(there_s, lambda: self._written(number, ids))

    def _written(self, number: int, ids: tuple[BlockId, ...]) -> None:
        if self._tiers is not None:
            self._tiers.stores[number].use(ids)
            self._tell_node(number)

    def _tell_node(self, number: int) -> None:
        if self._tiers is not None:
            self._view.announce_node(number, *self._tiers.stores[number].take_changes(), self._now_s)

    def _finish(self, job: Job) -> None:
        outcome, attempt = _key(job)
        outcome.ended_s = self._now_s + self._scenario.delays.hop_s
        outcome.output_tokens = outcome.request.output_tokens
        self._view.done(
            attempt,
            self._now_s,
            outcome="ok",
            ttft_s=max(0.0, outcome.first_token_s - outcome.granted_s),
            tpot_s=outcome.tpot_s,
            output_tokens=outcome.request.output_tokens,
        )
        self._follow(outcome)
        self._line.serve(self._now_s)

    def _refuse(self, outcome: Outcome) -> None:
        outcome.refused = True
        self._follow(outcome)

    def _follow(self, outcome: Outcome) -> None:
        """The request has ended: its session goes on."""
        following = self._sessions.after(outcome, self._now_s)
        if following is not None:
            self._events.at(following.arrived_s, self._arrival_of(following))

    def _lose_workers(self) -> None:
        numbers = self._random.sample(range(len(self.workers)), self._scenario.lost_workers)
        self._view.lose(numbers)
        for number in numbers:
            self._alive[number] = False
            for job in self.workers[number].lose(self._now_s):
                self._events.at(self._now_s + SUSPECT_S, self._rescue_of(job))

    def _rescue_of(self, job: Job) -> Callable[[], None]:
        return lambda: self._rescue(job)

    def _rescue(self, job: Job) -> None:
        """The gateway has noticed that the worker is gone."""
        outcome, attempt = _key(job)
        outcome.output_tokens += job.generated
        self._view.done(attempt, self._now_s, outcome="worker_failed")
        if not self._line.is_empty or not self._place(outcome):
            self._wait(outcome)


def _key(job: Job) -> tuple[Outcome, AttemptId]:
    assert isinstance(job.key, tuple)
    return job.key


def simulate(scenario: Scenario, trace: Trace) -> tuple[list[Outcome], Sequence[SimWorker]]:
    """Run `trace` through the cluster; what became of each request, and the workers at the end."""
    simulation = Simulation(scenario, trace)
    return simulation.run(), simulation.workers
