"""A model of time is found again from steps that follow it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.sim_calibration import Measured, errors, fit
from services.common.time_model import TimeModel

KINDS = [(tokens, 0, 0) for tokens in (64, 512)] + [(0, n, n * c) for n in (1, 2, 8) for c in (64, 448)]
MODELS = st.builds(
    TimeModel, st.floats(100, 1e5), st.floats(1e-3, 0.1), st.floats(0, 0.01), st.sampled_from([0.0, 1e-6, 1e-5])
)


def measured(model: TimeModel, noise: float = 0.0) -> list[Measured]:
    """Steps of every kind; every second one slower by `noise`, a share."""
    return [Measured(*kind, model.step_s(*kind) * (1 + noise * (i % 2))) for i, kind in enumerate(KINDS)]


@given(MODELS)
def test_exact_steps_give_the_model_back(model: TimeModel) -> None:
    assert max(errors(fit(measured(model)), measured(model))) < 1e-4


@given(MODELS, st.floats(0, 0.3))
def test_noise_makes_no_figure_negative(model: TimeModel, noise: float) -> None:
    found = fit(measured(model, noise))
    assert min(found.prefill_tokens_per_s, found.decode_step_s, found.decode_sequence_s, found.context_s) >= 0
    assert max(errors(found, measured(model))) <= 2 * noise + 1e-3
