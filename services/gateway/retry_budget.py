"""How many attempts beyond the first a tenant's requests may make, so that retries do not add to a failure. Pure."""

from __future__ import annotations

from services.common.token_bucket import TokenBucket


class RetryBudget:
    """One token bucket for each tenant that has used some of it lately."""

    def __init__(self, *, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, tenant: str, now_s: float) -> bool:
        """Whether one more attempt may be made; it is counted. now_s: monotonic time."""
        bucket = self._buckets.get(tenant)
        if bucket is None:
            self._drop_full(now_s)
            bucket = self._buckets[tenant] = TokenBucket(self._burst, self._per_s)
        if bucket.wait_s(1.0, now_s) > 0:
            return False
        bucket.take(1.0, now_s)
        return True

    def _drop_full(self, now_s: float) -> None:
        self._buckets = {tenant: bucket for tenant, bucket in self._buckets.items() if not bucket.is_full(now_s)}
