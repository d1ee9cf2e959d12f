"""Who balances by health checks, and who of them has heard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.common.balancers import FORGET_S, Balancers

# (peer, seconds since the event before, what the server said)
EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, FORGET_S), st.booleans()), max_size=30)


@given(EVENTS)
def test_every_balancer_hears_twice_or_is_forgotten(events: list[tuple[str, float, bool]]) -> None:
    balancers, now_s = Balancers(), 0.0
    last: dict[str, tuple[float, int]] = {}
    for peer, after_s, serving in events:
        now_s += after_s
        balancers.asked(peer, now_s, serving=serving)
        asked_at_s, refusals = last.get(peer, (now_s, 0))
        last[peer] = now_s, 0 if serving else (refusals if now_s - asked_at_s <= FORGET_S else 0) + 1
        untold = [one for one, (at_s, refusals) in last.items() if now_s - at_s <= FORGET_S and refusals < 2]
        assert balancers.num_untold(now_s) == len(untold)
    assert balancers.num_untold(now_s + 2 * FORGET_S) == 0


def test_one_that_hears_of_the_return_must_hear_of_the_next_end() -> None:
    balancers = Balancers()
    for serving, untold in ((True, 1), (False, 1), (False, 0), (True, 1), (False, 1), (False, 0)):
        balancers.asked("envoy", 1.0, serving=serving)
        assert balancers.num_untold(1.0) == untold
