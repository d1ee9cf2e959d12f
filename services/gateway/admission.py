"""How many requests may be in flight, in all and for a tenant. Pure counting; nobody waits here."""

from __future__ import annotations

from services.gateway.errors import Draining, Overloaded, TenantLimitExceeded


class Admission:
    """Owner of the in-flight counters. Invariant: `total` is the sum over tenants, and 0 when idle."""

    def __init__(self, *, max_total: int, max_tenant: int) -> None:
        self._max_total = max_total
        self._max_tenant = max_tenant
        self._by_tenant: dict[str, int] = {}
        self.total = 0
        self.draining = False

    def enter(self, tenant: str) -> None:
        """Take a place. Raises Draining, Overloaded or TenantLimitExceeded."""
        if self.draining:
            raise Draining("this gateway is shutting down")
        if self.total >= self._max_total:
            raise Overloaded(f"{self.total} requests are in flight")
        if self._by_tenant.get(tenant, 0) >= self._max_tenant:
            raise TenantLimitExceeded(f"{self._max_tenant} requests of this tenant are in flight")
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + 1
        self.total += 1

    def leave(self, tenant: str) -> None:
        """Give the place back; once for each `enter`."""
        self.total -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def statistics(self) -> dict[str, int]:
        """Requests in flight by tenant."""
        return dict(self._by_tenant)
