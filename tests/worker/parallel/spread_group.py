"""A group whose ranks are threads with an address each, as if on hosts of their own: no pool is shared."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bench.rank_group import TIMEOUT_S, engine_config, rank_place
from services.worker.engine.config import SpreadConfig
from services.worker.engine.open import map_staging
from services.worker.model.kv_pool import TORCH_DTYPES
from services.worker.model.layout import ComputeDtype
from services.worker.model.shard import Parallelism
from services.worker.parallel.block_parts import PartCopier
from services.worker.parallel.join import join_ranks
from services.worker.parallel.runner import ParallelRunner
from services.worker.parallel.step_link import StepLink
from tests.worker.parallel.thread_group import CONTEXT, NUM_BLOCKS, close_all, leave, run_rank

STAGING_SLOTS = 16
_JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SpreadGroup:
    """staging: [STAGING_SLOTS, kv_heads, layers, 2, 16, head_dim]; links: rank 0's."""

    runner: ParallelRunner
    copier: PartCopier
    staging: torch.Tensor
    links: list[StepLink]

    def gather(self, pool_slots: list[int], staging_slots: list[int]) -> None:
        """Until whole blocks are in staging."""
        copy = self.copier.gather(pool_slots, staging_slots)
        for link in self.links:
            link.settle()
        assert copy.is_done()


@contextmanager
def spread_group(
    path: Path, parallelism: Parallelism, dtype: ComputeDtype = "float32", others: Path | None = None
) -> Iterator[SpreadGroup]:
    """others: the model as ranks other than 0 have it. Raises what rank 0 raises while it loads."""
    with ExitStack() as stack:
        staging_fd = os.memfd_create("staging")
        stack.callback(os.close, staging_fd)
        store = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{store.getsockname()[1]}"
        config = engine_config(path, dtype, NUM_BLOCKS, CONTEXT, -1, -1)
        ends = []
        for rank in range(1, parallelism.num_ranks):
            here, there = socket.socketpair()
            front, front_there = socket.socketpair()
            stack.callback(front.close)
            place = msgspec.structs.replace(
                rank_place(parallelism, rank, (there.detach(),), -1),
                spread=SpreadConfig(store_address=address, own_host=f"127.0.0.{1 + rank}"),
            )
            told = msgspec.structs.replace(config, model_path=str(others or path), ranks=place)
            thread = threading.Thread(target=run_rank, args=(told, front_there))
            thread.start()
            stack.callback(thread.join, _JOIN_TIMEOUT_S)
            ends.append(here.detach())
        place = msgspec.structs.replace(
            rank_place(parallelism, 0, tuple(ends), store.detach()),
            spread=SpreadConfig(store_address=address, own_host="127.0.0.1"),
        )
        try:
            joined = join_ranks(config, place, 1, lambda _: None)
        except BaseException:
            close_all(ends)
            raise
        stack.callback(leave, joined)
        links = [StepLink(sock, TIMEOUT_S) for sock in joined.sockets]
        layout = joined.runner.spec.layout
        staging = map_staging(staging_fd, layout, STAGING_SLOTS * layout.block_bytes)
        copier = PartCopier(joined.runner.decoder.pool, joined.group.shard, links, staging, layout)
        whole = staging.view(TORCH_DTYPES[layout.dtype]).view(STAGING_SLOTS, *layout.block_shape)
        yield SpreadGroup(ParallelRunner(joined.runner, joined.group, links), copier, whole, links)
