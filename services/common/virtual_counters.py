"""Virtual token counters: what each tenant has been served, divided by its weight. Pure.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): whoever has the least is served next, and a
tenant that comes back after a pause is lifted to the least of those that wait, so that idle time is no credit. Where
nobody waits, it is lifted to the one that left last. What is only held for a turn that may yet come to nothing counts
in the order of those that wait, and not in what others are lifted to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

# Tenants remembered beyond those that wait; the least served ones would be lifted anyway.
MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """What a token of each kind costs, in computed prompt tokens."""

    prompt: float = 1.0
    output: float = 2.0
    cached: float = 0.1

    def cost(self, *, prompt_tokens: int, output_tokens: float, cached_tokens: int = 0) -> float:
        """Cost of a request; cached_tokens are among prompt_tokens."""
        computed = prompt_tokens - cached_tokens
        return self.prompt * computed + self.cached * cached_tokens + self.output * output_tokens


class VirtualCounters:
    """Counters of the tenants of one class. weight_of: a tenant's share against others, above 0."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._served: dict[str, float] = {}
        self._held: dict[str, float] = {}
        self._left_last = ""

    def of(self, tenant: str) -> float:
        """What `tenant` has been served, in cost over weight."""
        return self._served.get(tenant, 0.0)

    def rank(self, tenant: str) -> float:
        """What `tenant` has been served, and what is held: the least is next."""
        return self.of(tenant) + self._held.get(tenant, 0.0)

    def join(self, tenant: str, waiting: Collection[str]) -> None:
        """`tenant` begins to wait. waiting: those that do already."""
        floor = min(map(self.of, waiting)) if waiting else self.of(self._left_last)
        self._served[tenant] = max(self.of(tenant), floor)
        if len(self._served) > MAX_REMEMBERED + len(waiting):
            self._forget({tenant, self._left_last, *waiting})

    def leave(self, tenant: str) -> None:
        """Nothing of `tenant` waits any more."""
        self._left_last = tenant

    def hold(self, tenant: str, cost: float) -> float:
        """Hold what a turn will cost; the amount, for `release`."""
        amount = cost / self._weight_of(tenant)
        self._held[tenant] = self._held.get(tenant, 0.0) + amount
        return amount

    def release(self, tenant: str, amount: float) -> None:
        """The turn is taken, or came to nothing."""
        left = self._held[tenant] - amount
        if left > 1e-9:
            self._held[tenant] = left
        else:
            del self._held[tenant]

    def charge(self, tenant: str, cost: float) -> None:
        """Count what is served; negative: give back what was charged too much."""
        if tenant in self._served:
            self._served[tenant] += cost / self._weight_of(tenant)

    def _forget(self, kept: set[str]) -> None:
        idle = sorted((tenant for tenant in self._served if tenant not in kept), key=self.of)
        for tenant in idle[: len(idle) // 2]:
            del self._served[tenant]
