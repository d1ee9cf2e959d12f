"""How many tokens a tenant's requests produce, for charging before they are computed. Pure."""

from __future__ import annotations

from collections import OrderedDict

_FIRST_TOKENS = 128.0
_NEWEST_SHARE = 0.1
_MAX_TENANTS = 4096


class OutputForecast:
    """A mean for each tenant that favours the newest; of the longest unheard ones nothing is kept."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def tokens(self, tenant: str, most: int) -> float:
        """Expected output of one choice that may produce `most` tokens."""
        return min(float(most), self._means.get(tenant, _FIRST_TOKENS))

    def learn(self, tenant: str, tokens: float) -> None:
        """A choice has produced `tokens`."""
        mean = self._means.get(tenant, tokens)
        self._means[tenant] = mean + _NEWEST_SHARE * (tokens - mean)
        self._means.move_to_end(tenant)
        if len(self._means) > _MAX_TENANTS:
            self._means.popitem(last=False)
