"""Versions, weights and rollback as plain data."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.control.entries import (
    ALL,
    AdapterEntry,
    ModelEntry,
    adapter_key,
    adapter_of,
    check_adapter,
    register,
    rollback,
    set_traffic,
    unregister,
)
from services.router.control.table import KEEP_US, ControlTable, Entry
from services.router.errors import FailedPreconditionError, InvalidOperationError, LabelTakenError, OperatorError

A, B, C = ("a" * 32, "b" * 32, "c" * 32)


def registered() -> ModelEntry:
    return register(register(register(ModelEntry(), A, "v1"), B, "v2"), C, "v3")


def test_a_label_is_one_digest_s_and_a_digest_has_one_label() -> None:
    entry = registered()
    assert entry.versions == {"v1": A, "v2": B, "v3": C}
    assert register(entry, A, "v1") == entry
    with pytest.raises(LabelTakenError, match="v1"):
        register(entry, B, "v1")
    assert register(entry, A, "stable").versions == {"v2": B, "v3": C, "stable": A}
    assert register(ModelEntry(), A, "").versions == {"a" * 12: A}
    with pytest.raises(InvalidOperationError):
        register(entry, A, "no spaces")


def test_a_rollout_is_rolled_back_to_the_version_that_had_all_traffic() -> None:
    entry = set_traffic(registered(), {"v1": 1})
    assert entry.rollback_to == ""
    canary = set_traffic(entry, {"v1": 90, "v2": 10})
    half = set_traffic(canary, {"v1": 50, "v2": 50})
    assert (half.weights, half.rollback_to) == ({A: 50, B: 50}, A)
    assert rollback(half).weights == {A: ALL}
    whole = set_traffic(half, {"v2": 100})
    assert rollback(whole).weights == {A: ALL}
    assert rollback(set_traffic(whole, {"v2": 9, "v3": 1})).weights == {B: ALL}
    assert set_traffic(half, {"v1": 100}).rollback_to == ""
    with pytest.raises(FailedPreconditionError):
        rollback(rollback(half))
    with pytest.raises(FailedPreconditionError):
        rollback(set_traffic(half, {}))


def test_a_rollout_from_no_weights_is_rolled_back_to_the_version_that_kept_most() -> None:
    assert rollback(set_traffic(registered(), {"v1": 10, "v2": 90})).weights == {B: ALL}


def test_versions_are_named_by_label_digest_or_its_beginning() -> None:
    entry = registered()
    assert set_traffic(entry, {A: 1, "b" * 8: 2}).weights == {A: 1, B: 2}
    for wrong in ({"v9": 1}, {"b" * 7: 1}, {"v1": 1, A: 1}, {"v1": 0}, {"v1": 2**31}):
        with pytest.raises(InvalidOperationError):
            set_traffic(entry, wrong)
    twins = register(register(ModelEntry(), "a" * 31 + "0", "x"), "a" * 31 + "1", "y")
    with pytest.raises(InvalidOperationError, match="2 digests"):
        set_traffic(twins, {"a" * 8: 1})


def test_a_version_with_traffic_stays() -> None:
    entry = set_traffic(registered(), {"v1": 1, "v2": 1})
    with pytest.raises(FailedPreconditionError):
        unregister(entry, "v2")
    assert unregister(entry, "v3").versions == {"v1": A, "v2": B}
    assert unregister(set_traffic(entry, {"v2": 1}), "v1").rollback_to == ""


operations = st.lists(
    st.one_of(
        st.tuples(st.just("register"), st.sampled_from([A, B, C]), st.sampled_from(["v1", "v2", "v3"])),
        st.tuples(st.just("unregister"), st.sampled_from(["v1", "v2", "v3"])),
        st.tuples(st.just("traffic"), st.dictionaries(st.sampled_from(["v1", "v2", "v3"]), st.integers(0, 100))),
        st.tuples(st.just("rollback")),
    ),
    max_size=30,
)


@given(operations)
def test_whatever_operators_do_only_registered_versions_have_weights(steps: list[tuple[object, ...]]) -> None:
    entry = ModelEntry()
    changes = {"register": register, "unregister": unregister, "traffic": set_traffic, "rollback": rollback}
    for name, *arguments in steps:
        try:
            entry = changes[str(name)](entry, *arguments)  # type: ignore[operator]
        except OperatorError:
            continue
        digests = set(entry.versions.values())
        assert len(digests) == len(entry.versions)
        assert set(entry.weights) <= digests
        assert all(weight > 0 for weight in entry.weights.values())
        assert entry.rollback_to in {"", *digests}
        assert set(entry.weights) != {entry.rollback_to}


@pytest.mark.parametrize(
    ("name", "entry", "says"),
    [
        ("a:b", AdapterEntry(A, 8, "/a"), "not 1 to 64 letters"),
        ("a", AdapterEntry("abc", 8, "/a"), "32 digits in hex"),
        ("a", AdapterEntry(A, 0, "/a"), "rank 0"),
        ("a", AdapterEntry(A, 8, "a"), "an absolute path"),
        ("a", AdapterEntry(A, 8, "/a\n"), "an absolute path"),
    ],
)
def test_adapters_that_nobody_could_ask_for_or_load(name: str, entry: AdapterEntry, says: str) -> None:
    check_adapter("one.two-3", AdapterEntry(A, 8, "/a"))
    with pytest.raises(InvalidOperationError, match=says):
        check_adapter(name, entry)


def test_a_removed_adapter_does_not_apply_and_is_kept_for_a_day() -> None:
    key, table = adapter_key("a model: with colons", "one"), ControlTable()
    assert adapter_of(key) == ("a model: with colons", "one")
    entry = AdapterEntry(A, 8, "/a", 5)
    table.replace({key: Entry(1, msgspec.json.encode(entry))})
    assert table.adapters == {("a model: with colons", "one"): entry}
    assert not table.is_over(key, {}, KEEP_US * 2)
    table.replace({key: Entry(2, msgspec.json.encode(AdapterEntry()))})
    assert table.adapters == {}
    assert not table.is_over(key, {}, KEEP_US - 1)
    assert table.is_over(key, {}, KEEP_US + 2)
    assert table.beyond({}, {}, 3) == {key: table.entries[key]}
