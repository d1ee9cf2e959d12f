"""Which models a local mesh loads and unloads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.cli.loading_plan import LEAST_IDLE_S, Changes, PoolState, changes, merged

NAMES = ("a", "b", "c", "d")
WAITING, BUSY = PoolState(waiting=1), PoolState(running=1)
IDLE, OLD, DONE = PoolState(idle_s=9.0), PoolState(idle_s=60.0), PoolState(idle_s=300.0, is_wanted=False)
STATES = st.builds(PoolState, st.integers(0, 3), st.integers(0, 3), st.floats(0, 600), st.booleans())


def test_what_is_asked_for_is_loaded_and_what_nobody_wants_goes() -> None:
    assert changes(NAMES, {}, {}, 2) == Changes()
    assert changes(NAMES, {"a": WAITING, "b": PoolState(waiting=4)}, {}, 1) == Changes(load=("b",))
    assert changes(NAMES, {"a": DONE, "b": IDLE}, {"a": True, "b": True}, 2) == Changes(unload=("a",))


def test_the_idlest_makes_room_but_nothing_that_works_or_has_only_come() -> None:
    both = {"a": True, "b": True}
    assert changes(NAMES, {"a": IDLE, "b": OLD, "c": WAITING}, both, 2) == Changes(unload=("b",))
    assert changes(NAMES, {"a": BUSY, "b": WAITING, "c": WAITING}, both, 2) == Changes()
    fresh = PoolState(idle_s=LEAST_IDLE_S / 2)
    assert changes(NAMES, {"a": fresh, "b": BUSY, "c": WAITING}, both, 2) == Changes()
    # One that goes already makes room for one.
    assert changes(NAMES, {"a": IDLE, "b": OLD, "c": WAITING}, {"a": True, "b": False}, 2) == Changes()


@given(
    st.dictionaries(st.sampled_from(NAMES), STATES),
    st.dictionaries(st.sampled_from(NAMES), st.booleans()),
    st.integers(1, 4),
)
def test_the_bound_holds_and_no_work_is_interrupted(
    pools: dict[str, PoolState], loaded: dict[str, bool], max_loaded: int
) -> None:
    found = changes(NAMES, pools, loaded, max_loaded)
    assert len(loaded) + len(found.load) <= max(max_loaded, len(loaded))
    assert all(name not in loaded and pools[name].waiting for name in found.load)
    assert all(loaded[name] and pools[name].is_idle for name in found.unload)
    wanting = sum(name not in loaded and pool.waiting > 0 for name, pool in pools.items())
    for_others = [name for name in found.unload if pools[name].is_wanted]
    assert len(for_others) <= wanting
    assert len(set(found.unload)) == len(found.unload)


@given(st.lists(STATES, min_size=1))
def test_a_pool_is_as_busy_as_the_router_that_saw_most(states: list[PoolState]) -> None:
    whole = merged(states)
    assert whole.is_idle == all(state.is_idle for state in states)
    assert whole.idle_s == min(state.idle_s for state in states)
    assert whole.is_wanted == any(state.is_wanted for state in states)
