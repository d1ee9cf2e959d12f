"""What waits in the gateways, whoever's gateways they are: the work that no worker has been given yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# A gateway in which somebody waits says so every second; one that has been silent for this long has gone.
FORGET_S = 3.0


@dataclass(frozen=True, slots=True)
class ModelQueue:
    """Requests for one model that wait in a gateway. prompt_tokens: of all, cached or not."""

    model: str
    requests: int
    prompt_tokens: int


class GatewayQueues:
    """The last word of every gateway."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[tuple[ModelQueue, ...], float]] = {}

    def tell(self, gateway: str, queues: tuple[ModelQueue, ...], now_s: float) -> None:
        """A gateway's queues are these now."""
        if queues:
            self._queues[gateway] = queues, now_s
        else:
            self._queues.pop(gateway, None)

    def forget(self, gateways: Iterable[str]) -> None:
        """These gateways have gone."""
        for gateway in gateways:
            self._queues.pop(gateway, None)

    def total(self, model: str, now_s: float) -> ModelQueue:
        """What waits for `model` in all gateways heard of lately."""
        self.forget([gateway for gateway, (_, told_s) in self._queues.items() if now_s - told_s > FORGET_S])
        queues = [queue for queues, _ in self._queues.values() for queue in queues if queue.model == model]
        return ModelQueue(model, sum(one.requests for one in queues), sum(one.prompt_tokens for one in queues))

    def models(self, now_s: float) -> set[str]:
        """The models that something waits for."""
        return {
            queue.model for queues, told_s in self._queues.values() if now_s - told_s <= FORGET_S for queue in queues
        }

    def __contains__(self, gateway: str) -> bool:
        return gateway in self._queues

    def __len__(self) -> int:
        return len(self._queues)
