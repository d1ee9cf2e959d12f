"""Weighted rendezvous hashing: agreement, minimal movement, shares by weight."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.rendezvous import FIRST_WEIGHT, draw, ramp_weight, ranking

_names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)
_weights = st.floats(FIRST_WEIGHT, 1.0)
_clusters = st.dictionaries(st.text(min_size=1, max_size=8), _weights, min_size=1, max_size=8)
_keys = st.binary(max_size=20)


def best(key: bytes, weights: dict[str, float]) -> str:
    return ranking(key, weights)[0]


@given(_keys, _clusters, st.randoms())
def test_everybody_ranks_alike(key: bytes, weights: dict[str, float], random: object) -> None:
    shuffled = list(weights.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ranking(key, weights) == ranking(key, dict(shuffled))
    assert sorted(ranking(key, weights)) == sorted(weights)


@given(_keys, _clusters, st.integers(-8, 8))
def test_only_ratios_of_weights_matter(key: bytes, weights: dict[str, float], power: int) -> None:
    scaled = {name: weight * 2.0**power for name, weight in weights.items()}
    assert ranking(key, scaled) == ranking(key, weights)


@given(_keys, _clusters)
def test_who_leaves_moves_only_its_own_keys(key: bytes, weights: dict[str, float]) -> None:
    before = ranking(key, weights)
    for name in weights:
        left = {other: weight for other, weight in weights.items() if other != name}
        if left:
            assert ranking(key, left) == [other for other in before if other != name]


@given(_keys, _clusters, st.data())
def test_a_growing_weight_draws_keys_to_itself_alone(
    key: bytes, weights: dict[str, float], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(weights)))
    grown = {**weights, name: data.draw(st.floats(weights[name], 1.0))}
    assert best(key, grown) in (best(key, weights), name)
    if best(key, weights) == name:
        assert best(key, grown) == name


def test_shares_follow_the_weights() -> None:
    weights = {"a": 1.0, "b": 0.5, "c": 0.25}
    counts = Counter(best(number.to_bytes(4, "little"), weights) for number in range(20_000))
    for name, weight in weights.items():
        assert counts[name] / 20_000 == pytest.approx(weight / 1.75, abs=0.015)


@given(_names, _keys)
def test_draws_are_inside_the_open_interval(names: list[str], key: bytes) -> None:
    assert all(0.0 < draw(key, name) < 1.0 for name in names)
    assert len({draw(key, name) for name in names}) == len(names)


@given(st.floats(-1e3, 1e6), st.floats(0, 1e4), st.floats(0, 1e4))
def test_the_ramp_rises_from_little_to_all(age_s: float, later_s: float, ramp_s: float) -> None:
    now, later = ramp_weight(age_s, ramp_s), ramp_weight(age_s + later_s, ramp_s)
    assert FIRST_WEIGHT <= now <= later <= 1.0
    assert ramp_weight(ramp_s, ramp_s) == 1.0
    assert ramp_weight(0, 60.0) == FIRST_WEIGHT
