"""A tenant's quotas as one gateway keeps them while Redis does not answer: its share of what was left. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.token_bucket import TokenBucket
from services.gateway.tenants import TenantPolicy


@dataclass(frozen=True, slots=True)
class QuotaLeft:
    """What Redis last said of a tenant: what is left of the minute's requests and tokens, and for how many gateways."""

    requests: float
    tokens: float
    gateways: int


@dataclass(frozen=True, slots=True)
class UsedUp:
    """Which quota is used up, and the seconds until it is not."""

    quota: str
    wait_s: float


class QuotaShare:
    """Counts alone. Levels of the buckets are those at the loss of Redis, divided by the gateways."""

    def __init__(self, policy: TenantPolicy, left: QuotaLeft | None) -> None:
        """left: None when Redis was never heard of this tenant; then everything is left, for this gateway alone."""
        gateways = max(1, left.gateways if left is not None else 1)
        self.policy = policy
        self._concurrent = policy.concurrent_requests and max(1, policy.concurrent_requests // gateways)
        self._requests = _bucket(policy.requests_per_minute, None if left is None else left.requests, gateways)
        self._tokens = _bucket(policy.tokens_per_minute, None if left is None else left.tokens, gateways)

    def take(self, tokens: float, num_open: int, now_s: float) -> UsedUp | None:
        """Charge a request, or say why not. num_open: the tenant's requests in flight here. now_s: monotonic time."""
        waits = [
            UsedUp(name, bucket.wait_s(amount, now_s))
            for name, bucket, amount in (("requests", self._requests, 1.0), ("tokens", self._tokens, tokens))
            if bucket is not None
        ]
        longest = max(waits, key=lambda wait: wait.wait_s, default=None)
        if longest is not None and longest.wait_s > 0:
            return longest
        if self._concurrent and num_open >= self._concurrent:
            return UsedUp("concurrent", 1.0)
        if self._requests is not None:
            self._requests.take(1.0, now_s)
        self.give_back(-tokens, now_s)
        return None

    def give_back(self, tokens: float, now_s: float) -> None:
        """Tokens that were charged and not used; negative: used beyond the charge."""
        if self._tokens is not None:
            self._tokens.take(-tokens, now_s)


def _bucket(per_minute: int | None, left: float | None, gateways: int) -> TokenBucket | None:
    """A share of one quota. A bucket holds at least one, so that a small share still admits a request now and then."""
    if per_minute is None:
        return None
    capacity = max(1.0, per_minute / gateways)
    return TokenBucket(capacity, per_minute / gateways / 60, None if left is None else left / gateways)
