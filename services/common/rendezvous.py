"""Rendezvous hashing: everybody who knows the names chooses the same one for a key, without talking. Pure.

Each name draws a number from the key and the highest score wins, so that a name that comes or goes moves only its own
keys (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998). With weights the score is
-weight / ln(draw): a name gets its weight's share of the keys, and raising a weight moves keys to that name only
(Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005, the logarithmic method).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

# Share of a full weight that a name begins with.
FIRST_WEIGHT = 1 / 16


def draw(key: bytes, name: str) -> float:
    """A number strictly between 0 and 1 that depends on key and name alone."""
    digest = blake2b(len(key).to_bytes(4, "little") + key + name.encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 11) + 0.5) / 2**53


def ranking(key: bytes, weights: Mapping[str, float]) -> list[str]:
    """The names, most preferred first. Weights are positive; only their ratios matter."""
    return sorted(weights, key=lambda name: (-weights[name] / math.log(draw(key, name)), name), reverse=True)


def ramp_weight(age_s: float, ramp_s: float) -> float:
    """Weight of a name that is `age_s` old: from FIRST_WEIGHT to 1, in proportion to its age, in `ramp_s`."""
    return 1.0 if ramp_s <= 0 else min(1.0, max(FIRST_WEIGHT, age_s / ramp_s))
