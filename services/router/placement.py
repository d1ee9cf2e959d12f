"""The decision: which worker serves a request and what it pulls from where. Pure; time comes in as an argument."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.common.running_mean import RunningMean
from services.router.admission import RETRY_S, AdmissionConfig, Forecast, admissible, in_time, paced
from services.router.calibration import Calibration
from services.router.capability import candidates as able_candidates
from services.router.capability import is_too_large
from services.router.domain import Ask, Explanation, Placement, Prediction, RefusalReason, Refused, WorkerId
from services.router.handoff import (
    MAX_DECODE,
    MAX_PREFILL,
    Pair,
    Side,
    alone_s,
    best_pair,
    decode_part_s,
    handed_over,
    prefill_part_s,
    shortlist,
)
from services.router.holders import Holders, Holding, Source, pull_run
from services.router.lateness import Lateness
from services.router.policies import POLICIES, Policy
from services.router.policies.costs import Costs, estimate
from services.router.policies.view import FloatArray, PolicyRequest, PolicyView, rendezvous
from services.router.roll_call import Present
from services.router.worker_rows import Selection
from services.router.workers import WorkerTable

# Blocks of a prompt that say where requests like it go when nothing else does.
PREFIX_BLOCKS = 8
_FIRST_OUTPUT_TOKENS = 128.0
# Others do not count in seconds, in which a pair is compared with a worker that does all.
_PAIRING_POLICY = "predicted_ttft"


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Policy by default, the one without an index, and when to refuse."""

    policy: str
    admission: AdmissionConfig
    degraded_policy: str = "prefix_hash"


@dataclass(frozen=True, slots=True)
class _Asked:
    """An ask with what is known of it and of the mesh at this moment."""

    ask: Ask
    request: PolicyRequest
    holding: Holding
    present: Present
    model: int
    now_s: float


class Placer:
    """Answers asks from the view; the caller counts the grants."""

    def __init__(
        self,
        config: PlacementConfig,
        table: WorkerTable,
        holders: Holders,
        policies: Mapping[str, Policy] = POLICIES,
    ) -> None:
        """policies: those that can be asked for, by name."""
        self._config = config
        self._policies = policies
        self._table = table
        self._holders = holders
        self._sequence = 0
        self.output_tokens = RunningMean(_FIRST_OUTPUT_TOKENS)
        # Share of a prompt's blocks that some worker held.
        self.reuse = RunningMean(0.0)
        # Share of their prompts that grants leave to be computed.
        self.computed_share = RunningMean(1.0)
        self.lateness = Lateness()
        # By number of the model.
        self._calibrations: defaultdict[int, Calibration] = defaultdict(Calibration)

    def place(
        self, ask: Ask, now_s: float, *, index_usable: bool = True, waiting_tokens: float = 0.0
    ) -> Placement | Refused:
        """A placement or a refusal.

        index_usable: False when nothing is known of where blocks are. waiting_tokens: of the prompts for this model
        that wait in gateways.
        """
        present = self._table.present(now_s)
        model = self._table.model_number(ask.model, ask.model_digest)
        candidates = able_candidates(ask, self._table, present, model)
        if stands_in := not len(candidates.rows):
            # Whoever is there for prompts answers, too, before a request has nobody.
            candidates = able_candidates(ask, self._table, present, model, whole=False)
        if not len(candidates.rows):
            return self._refusal(ask, present.serving, model)
        self._sequence += 1
        policy = ask.policy or (self._config.policy if index_usable else self._config.degraded_policy)
        request = self._request(ask, candidates, now_s)
        asked = _Asked(ask, request, self._holders.find(ask.block_ids), present, model, now_s)
        side = self._side(asked, candidates)
        local_blocks = side.view.local_blocks
        if request.usable_blocks:
            self.reuse.update(float(local_blocks[local_blocks.argmax()]) / request.usable_blocks)
        backlog_s = waiting_tokens * self.computed_share.value / side.view.rows["prefill_tokens_per_s"].sum()
        forecast = Forecast(self.lateness.factor, float(backlog_s))
        admitted = admissible(ask, side.view.rows, side.costs, self._config.admission, forecast)
        pairs = policy == _PAIRING_POLICY and not stands_in
        pair = self._pair(asked, side, forecast, may_wait=not isinstance(admitted, Refused)) if pairs else None
        if isinstance(admitted, Refused):
            return admitted if pair is None else self._handed_over(asked, side, pair, policy)
        scores = np.where(admitted, self._policies[policy](request, side.view, side.costs), np.inf)
        chosen = _lowest(scores, side.view, request)
        if pair is not None and pair.score < alone_s(side)[chosen]:
            return self._handed_over(asked, side, pair, policy)
        return self._counted(ask, self._placement(asked, side, scores, chosen, policy))

    def learn(self, worker_id: WorkerId, prediction: Prediction, now_s: float, *, ttft_s: float, tpot_s: float) -> None:
        """An attempt has ended; 0 for a time that it did not have."""
        worker = self._table.workers.get(worker_id)
        if worker is not None and (ttft_s > 0 or tpot_s > 0):
            model = int(self._table.rows["model"][worker.row])
            log_ratio = self._calibrations[model].observe(prediction, ttft_s=ttft_s, tpot_s=tpot_s)
            self._table.paced(worker_id, log_ratio, now_s)
        self.lateness.update(prediction.ttft_s, ttft_s)

    def knows(self, model: str) -> bool:
        """Whether a worker of this public name has ever been seen and is not forgotten."""
        return any(
            worker.identity.model == model if worker.identity else worker.record.model == model
            for worker in self._table.workers.values()
        )

    def _refusal(self, ask: Ask, serving: npt.NDArray[np.bool_], model: int) -> Refused:
        if not self.knows(ask.model):
            return Refused(RefusalReason.UNKNOWN_MODEL, f"no worker serves the model {ask.model}", 0.0)
        if model < 0:
            return Refused(RefusalReason.NO_WORKER, "no worker has this digest of the model", RETRY_S)
        ready = serving & (self._table.rows["model"] == model)
        if ready.any() and ask.excluded_workers:
            return Refused(RefusalReason.NO_WORKER, "every worker that could serve the request is excluded", RETRY_S)
        if not ready.any():
            return Refused(RefusalReason.NO_WORKER, "no worker of the model is ready", RETRY_S)
        too_large = ask.knows_too_large and is_too_large(ask, self._table, model)
        reason = RefusalReason.TOO_LARGE if too_large else RefusalReason.NO_WORKER
        return Refused(reason, "no worker can finish such a request", RETRY_S)

    def _request(self, ask: Ask, candidates: Selection, now_s: float) -> PolicyRequest:
        choices = max(1, ask.num_choices)
        key = (
            ask.block_ids[min(len(ask.block_ids), PREFIX_BLOCKS) - 1]
            if ask.block_ids
            else blake2b(ask.id.request_id.encode(), digest_size=8).digest()
        )
        return PolicyRequest(
            prompt_tokens=ask.prompt_tokens,
            block_tokens=int(self._table.rows["block_tokens"][candidates.rows[0]]),
            num_choices=choices,
            expected_output_tokens=min(self.output_tokens.value, max(1.0, ask.max_output_tokens / choices)),
            prefix_key=int.from_bytes(key[:8], "little"),
            sequence=self._sequence,
            now_s=now_s,
            priority=ask.priority,
        )

    def _counted(self, ask: Ask, placement: Placement) -> Placement:
        self.computed_share.update(placement.prefill_tokens / ask.prompt_tokens)
        return placement

    def _side(self, asked: _Asked, candidates: Selection) -> Side:
        """What the request would cost each of some workers."""
        request, holding = asked.request, asked.holding
        local_blocks = np.minimum(self._holders.lengths(holding, candidates.at), request.usable_blocks)
        sources = self._holders.sources(
            holding, candidates, asked.present.givers, local_blocks=local_blocks, turn=self._sequence
        )
        pressure = self._table.pressure(candidates, asked.now_s, reuse=self.reuse.value)
        rows, correction = self._table.rows.pick(candidates), self._calibrations[asked.model].correction
        adapter = asked.ask.requires.adapter
        loads = self._table.adapter_loads(candidates.rows, adapter, asked.now_s) if adapter else None
        view = PolicyView(rows, local_blocks, self._holders.arrays(sources, candidates), pressure, correction, loads)
        return Side(candidates.rows, view, estimate(request, view), sources)

    def _pair(self, asked: _Asked, decode: Side, forecast: Forecast, *, may_wait: bool) -> Pair | None:
        """The best pair of a worker that computes prompts and one that does all, where there are any.

        may_wait: of workers whose queue is at the grant limit, too; being compared with one that does all bounds that.
        """
        ask, request = asked.ask, asked.request
        if not ask.can_hand_off or ask.resumes:
            return None
        able = able_candidates(ask, self._table, asked.present, asked.model, whole=False)
        if not len(able.rows):
            return None
        prefill = self._side(asked, able)
        rows, config = prefill.view.rows, self._config.admission
        if may_wait:
            may = paced(ask, rows, prefill.costs, config) & in_time(ask, rows, prefill.costs, forecast)
        else:
            admitted = admissible(ask, rows, prefill.costs, config, forecast)
            if isinstance(admitted, Refused):
                return None
            may = admitted
        keeps_pace = paced(ask, decode.view.rows, decode.costs, config)
        firsts = shortlist(prefill_part_s(prefill), may & rows["serves_pulls"], MAX_PREFILL)
        seconds = shortlist(decode_part_s(request, decode), keeps_pace, MAX_DECODE)
        first_rows, second_rows = prefill.rows[firsts], decode.rows[seconds]
        names = [self._table.workers[self._table.by_row[row]].record.life for row in first_rows.tolist()]
        same_host = self._table.rows["host"][first_rows][:, None] == self._table.rows["host"][second_rows]
        links = self._table.links
        return best_pair(
            request,
            prefill,
            decode,
            firsts=firsts,
            seconds=seconds,
            links=links.links(second_rows, names, same_host, self._table.compute_bytes_per_s(second_rows)),
            queue_bytes=links.queue_bytes(names),
        )

    def _handed_over(self, asked: _Asked, decode: Side, pair: Pair, policy: str) -> Placement:
        first = self._placement(asked, pair.first, pair.prefill_scores, pair.prefill, policy)
        second = self._placement(asked, decode, pair.decode_scores, pair.decode, policy)
        worker, blocks = self._table.workers[first.worker_id], asked.request.usable_blocks
        giver = Source(worker.record, worker.row, blocks, blocks)
        return self._counted(asked.ask, handed_over(first, second, giver, asked.request, pair))

    def _placement(self, asked: _Asked, side: Side, scores: FloatArray, chosen: int, policy: str) -> Placement:
        view, costs = side.view, side.costs
        worker_id = self._table.by_row[int(side.rows[chosen])]
        worker = self._table.workers[worker_id]
        identity = worker.identity
        assert identity is not None
        runs = [pull_run(side.sources[source], first, end) for source, first, end in costs.pull.runs(chosen)]
        tokens = int(costs.prefill_tokens[chosen])
        return Placement(
            worker_id=worker_id,
            worker_epoch=identity.epoch,
            worker_address=worker.record.grpc_address,
            pull_plan=runs,
            local_blocks=int(view.local_blocks[chosen]),
            predicted_ttft_s=float(costs.predicted_ttft_s[chosen]),
            predicted_tpot_s=float(costs.predicted_tpot_s[chosen]),
            prefill_tokens=tokens,
            num_blocks=-(-tokens // identity.block_tokens) + sum(run.num_blocks for run in runs),
            pulled_bytes=tuple((run.holder, float(run.num_blocks * identity.block_bytes)) for run in runs),
            policy=policy,
            explanation=Explanation(side.rows, scores, costs.terms, chosen),
            prediction=_prediction(view, costs, chosen),
            prefill_pairs=float(costs.prefill_pairs[chosen]),
            work_s=float(costs.work_s[chosen]),
            prefill_s=float(costs.prefill_s[chosen]),
            block_bytes=identity.block_bytes,
        )


def _prediction(view: PolicyView, costs: Costs, chosen: int) -> Prediction:
    return Prediction(
        features=costs.features(chosen),
        pace=float(view.rows["pace"][chosen]),
        ttft_s=float(costs.predicted_ttft_s[chosen]),
        tpot_s=float(costs.predicted_tpot_s[chosen]),
        uncorrected_ttft_s=costs.uncorrected_ttft_s(chosen),
        queue_s=float(costs.queue_s[chosen]),
        uncorrected_tpot_s=float(costs.uncorrected_tpot_s[chosen]),
    )


def _lowest(scores: FloatArray, view: PolicyView, request: PolicyRequest) -> int:
    """The lowest score; among equals the one that the prompt's beginning prefers, so that they spread by prefix."""
    first = int(scores.argmin())
    best = float(scores[first])
    near = scores <= best + 1e-9 * (1.0 + abs(best))
    if np.count_nonzero(near) == 1:
        return first
    equals = np.flatnonzero(near)
    return int(equals[rendezvous(view.rows["name_hash"][equals], request.prefix_key).argmax()])
