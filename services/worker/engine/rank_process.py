"""An engine process whose rank is not 0: load its part, say so, take steps until a peer goes."""

from __future__ import annotations

import gc

import structlog
import torch

from services.worker.engine.config import EngineConfig, RankConfig
from services.worker.engine.start import cannot_start, prepare_torch
from services.worker.engine_messages import RankReady
from services.worker.errors import RankLost
from services.worker.ipc import Link
from services.worker.messages import Message
from services.worker.parallel.join import join_ranks
from services.worker.parallel.rank import RankLoop
from services.worker.parallel.step_link import RankLink

_log = structlog.get_logger()


def run_rank(config: EngineConfig, place: RankConfig, front: Link[Message]) -> int:
    """The exit status."""
    threads = prepare_torch(config.threads)
    try:
        joined = join_ranks(config, place, threads, lambda _: None)
    except Exception as error:
        front.send(cannot_start(error))
        return 1
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    front.send(RankReady())
    (sock,) = joined.sockets
    try:
        RankLoop(joined.runner, joined.group, RankLink(sock, place.step_timeout_s), front).run()
    except (ConnectionError, RankLost) as error:
        _log.info("a peer has gone", rank=place.rank, reason=str(error))
    return 1
