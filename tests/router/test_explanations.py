"""Why requests went where they went: what is kept, and for how long."""

from __future__ import annotations

import numpy as np

from services.router.domain import Ask, AttemptId, Explanation, Placement, Prediction, RefusalReason, Refused, WorkerId
from services.router.explanations import KEPT_CANDIDATES, MAX_ATTEMPTS, Ended, Explanations

NAMES = {row: WorkerId(f"w{row}") for row in range(40)}


def ask(request_id: str, attempt: int = 1) -> Ask:
    return Ask(AttemptId(request_id, attempt), "m", b"d" * 16, [], prompt_tokens=50, max_output_tokens=9)


def placement(scores: list[float], chosen: int) -> Placement:
    terms = {"queue_s": np.array(scores) / 2, "prefill_s": np.array(scores) / 4}
    return Placement(
        worker_id=NAMES[chosen],
        worker_epoch=1,
        worker_address="a:1",
        pull_plan=[],
        local_blocks=3,
        predicted_ttft_s=0.5,
        predicted_tpot_s=0.02,
        prefill_tokens=50,
        num_blocks=4,
        pulled_bytes=(),
        policy="predicted_ttft",
        explanation=Explanation(
            np.arange(len(scores)), np.array(scores), lambda at: {name: of[at] for name, of in terms.items()}, chosen
        ),
        prediction=Prediction((), 1.0, 0.5, 0.02, 0.5, 0.02, 0.0),
    )


def test_the_best_candidates_are_kept_with_their_terms_and_the_end() -> None:
    explanations = Explanations(10)
    scores = [float((row * 7) % 40) for row in range(40)]
    explanations.decided(ask("r"), placement(scores, chosen=0), NAMES, 100.0)
    explanations.ended(AttemptId("r", 1), Ended("ok", 0.6, 0.021, 9))
    (decision,) = explanations.of("r")
    assert decision.candidates is not None
    rows = list(decision.candidates.rows())
    assert (decision.candidates.total, len(rows)) == (40, KEPT_CANDIDATES)
    assert [score for _, score, _ in rows] == sorted(scores)[:KEPT_CANDIDATES]
    assert rows[1] == (f"w{scores.index(1.0)}", 1.0, {"queue_s": 0.5, "prefill_s": 0.25})
    assert decision.ended == Ended("ok", 0.6, 0.021, 9)


def test_of_equals_the_chosen_one_is_first() -> None:
    explanations = Explanations(10)
    explanations.decided(ask("r"), placement([1.0] * 20, chosen=17), NAMES, 0.0)
    candidates = explanations.of("r")[0].candidates
    assert candidates is not None
    assert next(candidates.rows())[0] == "w17"


def test_attempts_prompts_and_refusals_are_told_apart() -> None:
    explanations = Explanations(10)
    refused = Refused(RefusalReason.OVERLOADED, "every worker is full", 2.0)
    explanations.decided(ask("r"), refused, NAMES, 0.0)
    explanations.decided(ask("r", 2), placement([1.0], chosen=0), NAMES, 1.0)
    explanations.decided(ask("r-1"), refused, NAMES, 2.0)
    explanations.ended(AttemptId("r", 1), Ended("stale"))
    assert [(one.id.request_id, one.id.attempt) for one in explanations.of("r")] == [("r", 1), ("r", 2), ("r-1", 1)]
    assert [one.ended for one in explanations.of("r")] == [Ended("stale"), None, None]
    assert explanations.of("unknown") == []
    explanations.ended(AttemptId("unknown", 1), Ended("ok"))


def test_both_bounds_hold() -> None:
    explanations, refused = Explanations(3), Refused(RefusalReason.OVERLOADED, "", 1.0)
    for number in range(5):
        explanations.decided(ask(f"r{number}"), refused, NAMES, 0.0)
    assert (len(explanations), explanations.of("r1")) == (3, [])
    for attempt in range(100):
        explanations.decided(ask("r4", attempt + 2), refused, NAMES, 0.0)
    kept = explanations.of("r4")
    assert (len(kept), kept[0].id.attempt, kept[-1].id.attempt) == (MAX_ATTEMPTS, 1, 101)
    none = Explanations(0)
    none.decided(ask("r"), refused, NAMES, 0.0)
    assert len(none) == 0
