"""Takes another router's news into this router's view. Synchronous; time comes in as an argument."""

from __future__ import annotations

from dataclasses import replace

from services.router.gateway_queues import GatewayQueues
from services.router.news.messages import ClosedNews, GrantedNews, News, QueuesNews
from services.router.workers import WorkerTable


def take_in(news: News, table: WorkerTable, queues: GatewayQueues, now_s: float) -> None:
    """What concerns workers that this router does not know, or knows in another epoch, is ignored."""
    match news:
        case GrantedNews():
            worker = table.workers.get(news.worker_id)
            # A report of the admission may have been faster than the news of the grant.
            if worker is not None and worker.record.epoch == news.epoch and str(news.attempt) not in worker.shown:
                table.grant(news.worker_id, news.attempt, replace(news.pending, granted_s=now_s))
        case ClosedNews():
            table.end(news.worker_id, news.attempt, now_s)
        case QueuesNews():
            queues.tell(news.gateway, news.queues, now_s)
