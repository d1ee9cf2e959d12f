"""How the ranks of a group load a model together: each reads its part, and all agree on what was read.

A rank reads the chunks (services/common/artifacts) that hold bytes of its part, and keeps those bytes alone; rank 0
also reads what nobody wants, headers mostly; in a spread group, where each host has files of its own, rank 0 reads
everything, so that the others' are known to be the same. Each digests what it has read; the digests come together, and
where two have read the same chunk they must be equal. So the model digest is that of a single process, and every rank
has verified what it computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import structlog
import torch

from services.common.artifacts.chunk_reader import CHUNK_BYTES, FileDigest, Progress, num_chunks
from services.common.artifacts.manifest import file_size
from services.worker.model.errors import InvalidWeights
from services.worker.model.kv_pool import TORCH_DTYPES
from services.worker.model.layout import KV_DTYPE_BYTES, ComputeDtype
from services.worker.model.model_files import ModelFiles
from services.worker.model.reading import SharedReading, touched_chunks
from services.worker.model.seam import Seam
from services.worker.model.shard import Shard, share_bytes
from services.worker.model.weights import ModelWeights, TensorSource, load_weights, weight_bytes

_DIGEST_BYTES = 32
log = structlog.get_logger(__name__)


class Ranks(Seam, Protocol):
    """A group as one of its ranks sees it."""

    @property
    def shard(self) -> Shard:
        """This rank's part."""

    @property
    def is_spread(self) -> bool:
        """Whether the ranks are on several hosts."""

    def gather(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """What each rank gives, in their order: uint8 of the same shape. Raises RankLost."""


def read_part(model: ModelFiles, ranks: Ranks, progress: Progress | None) -> tuple[TensorSource, bytes]:
    """The rank's tensors, and the digest of all weights. Raises InvalidWeights or RankLost."""
    if ranks.is_spread:
        _check_same(model, ranks)
    names = [file.path.name for file in model.files]
    chunks = rank_chunks(model, ranks.shard, is_spread=ranks.is_spread)
    share = SharedReading(chunks, lambda digests: _merged(names, digests, ranks))
    return model.part(ranks.shard).read(progress=progress, share=share)


def rank_chunks(model: ModelFiles, shard: Shard, *, is_spread: bool = False) -> list[list[int]]:
    """Of each file the chunks that the rank reads. Over all ranks, on rank 0 of a spread group alone, they are all."""
    if is_spread and shard.rank == 0:
        return [list(range(num_chunks(file_size(file.path)))) for file in model.files]
    wanted = _touched(model, shard)
    if shard.rank == 0:
        others = [
            _touched(model, Shard(shard.whole, shard.parallelism, rank))
            for rank in range(1, shard.parallelism.num_ranks)
        ]
        for number, file in enumerate(model.files):
            every = set(range(num_chunks(file_size(file.path))))
            wanted[number] |= every.difference(*(chunks[number] for chunks in others))
    return [sorted(chunks) for chunks in wanted]


def bytes_to_read(model: ModelFiles, shard: Shard, *, is_spread: bool = False) -> int:
    """Of all files."""
    return sum(
        min(CHUNK_BYTES, file_size(file.path) - chunk * CHUNK_BYTES)
        for file, chunks in zip(model.files, rank_chunks(model, shard, is_spread=is_spread), strict=True)
        for chunk in chunks
    )


def _touched(model: ModelFiles, shard: Shard) -> list[set[int]]:
    return [touched_chunks(file) for file in model.part(shard).files]


def _check_same(model: ModelFiles, ranks: Ranks) -> None:
    """Raise InvalidWeights where another rank has a model of other shapes, or files of other sizes."""
    seen = blake2b(repr(model.config).encode(), digest_size=_DIGEST_BYTES)
    for file in model.files:
        seen.update(file_size(file.path).to_bytes(8, "little"))
    given = [
        part.numpy().tobytes() for part in ranks.gather(torch.frombuffer(bytearray(seen.digest()), dtype=torch.uint8))
    ]
    for rank, one in enumerate(given):
        if one != given[0]:
            raise InvalidWeights(f"{model.path.name}: rank {rank} has another model on its host than rank 0")


def _merged(names: Sequence[str], digests: Sequence[FileDigest], ranks: Ranks) -> list[FileDigest]:
    """The digests of all chunks from those of each rank. Raises InvalidWeights where two differ."""
    own = b"".join(chunk or bytes(_DIGEST_BYTES) for one in digests for chunk in one.chunks)
    given = [part.numpy().tobytes() for part in ranks.gather(torch.frombuffer(bytearray(own), dtype=torch.uint8))]
    merged, start = [], 0
    for name, one in zip(names, digests, strict=True):
        chunks = []
        for index in range(len(one.chunks)):
            found = {part[start : start + _DIGEST_BYTES] for part in given} - {bytes(_DIGEST_BYTES)}
            if len(found) != 1:
                others = " on the ranks' hosts" if ranks.is_spread else ""
                raise InvalidWeights(
                    f"{name}: chunk {index} was read {len(found)} times, differently each time{others}"
                )
            chunks.append(found.pop())
            start += _DIGEST_BYTES
        merged.append(FileDigest(one.size, tuple(chunks)))
    return merged


def load_part(source: TensorSource, shard: Shard, dtype: ComputeDtype) -> ModelWeights:
    """The rank's weights, checked against its share of the model's bytes. Raises InvalidWeights."""
    weights = load_weights(source, shard.config, TORCH_DTYPES[dtype], first=shard.is_first, last=shard.is_last)
    held, share = weight_bytes(weights), share_bytes(shard, KV_DTYPE_BYTES[dtype])
    log.info("rank loaded", rank=shard.rank, bytes=held, share_bytes=share.divided, replicated_bytes=share.replicated)
    assert held <= share.total, f"rank {shard.rank} holds {held} bytes of parameters, its share is {share.total}"
    return weights
