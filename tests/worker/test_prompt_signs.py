"""A long prompt's caller hears that it gets on, and nothing of that once there is more to say."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.core import EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.messages import Message, PromptAdvanced, Resume, StepOutput
from services.worker.prompt_signs import EVERY_S
from services.worker.sampler import draw_tokens
from tests.worker.cores import known_output, make_core, submit
from tests.worker.test_known_output import Toy

LONG = [(7 * i + i // 5) % 97 for i in range(240)]
OUTPUT = 6


def run_slowly(toy: Toy, step_s: float) -> list[tuple[float, Message]]:
    """All there is to do in steps that take so long; what is said, and when."""
    builder, said = StepBuilder(), []
    while chunks := toy.core.schedule(toy.now):
        toy.now += step_s
        toy.runner.submit(builder.build(chunks))
        toy.core.commit(chunks, draw_tokens(toy.runner.collect(), EngineCore.draw_rows(chunks)), step_s, toy.now)
        said += [(toy.now, message) for message in toy.core.to_front]
        toy.core.to_front.clear()
    return said


@settings(max_examples=30)
@given(step_s=st.floats(0.01, 5.0), prompt=st.integers(1, len(LONG)), known=st.integers(0, 3), held=st.booleans())
def test_the_caller_hears_something_at_least_as_often_as_promised(
    step_s: float, prompt: int, known: int, *, held: bool
) -> None:
    toy = Toy(make_core(64, max_queue_s=1e6))
    output = [known_output(0, LONG[:known])] if known else []
    toy.tell(submit(1, LONG[:prompt], OUTPUT, known=output, deadline_s=1e6, hold_s=1e5 if held else 0.0))
    toy.said.clear()
    said = run_slowly(toy, step_s)
    if held:
        assert not any(isinstance(message, StepOutput) for _, message in said)
        toy.tell(Resume(1, []))
        said += run_slowly(toy, step_s)
    times = [0.0, *(at for at, message in said if isinstance(message, StepOutput | PromptAdvanced))]
    assert all(after - before <= EVERY_S + step_s + 1e-6 for before, after in pairwise(times))
    first_output = next(i for i, (_, message) in enumerate(said) if isinstance(message, StepOutput))
    assert not any(isinstance(message, PromptAdvanced) for _, message in said[first_output:])


def test_a_prompt_that_is_computed_at_once_says_nothing_of_it() -> None:
    toy = Toy(make_core(64))
    toy.tell(submit(1, LONG, OUTPUT))
    assert not any(isinstance(message, PromptAdvanced) for _, message in run_slowly(toy, 0.01))
