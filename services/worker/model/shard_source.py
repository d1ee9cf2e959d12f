"""A rank's part of a model's tensors: which rows of which tensor it reads, and a TensorSource of just that part.

Names are Hugging Face's (weights.py). Rows of a first dimension that a rank lacks are not read; columns lie scattered
over all rows, so tensors that divide by columns are read whole and cut in memory. The part goes by the names of a model
of its own: its layers are numbered from 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.worker.model.errors import InvalidWeights
from services.worker.model.shard import Shard
from services.worker.model.weights import TensorSource

# Of a tensor's name and shape: the rows of its first dimension that are read; None: the tensor is not.
RowsWanted = Callable[[str, tuple[int, ...]], range | None]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_STACKED = re.compile(r"mlp\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)")
_DOWN = ("w2", "down_proj")


@dataclass(frozen=True, slots=True)
class Cut:
    """Along one dimension: which parts of `size` are kept, one behind the other."""

    dim: int
    size: int
    parts: tuple[range, ...]

    @property
    def hull(self) -> range:
        """From the first kept one to the last."""
        return range(self.parts[0].start, self.parts[-1].stop)

    def of(self, tensor: torch.Tensor, first: int) -> torch.Tensor:
        """What is kept of a tensor that begins at `first` of the whole."""
        pieces = [tensor.narrow(self.dim, part.start - first, len(part)) for part in self.parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of one tensor, and what it is called there."""

    name: str
    cuts: tuple[Cut, ...] = ()

    def rows(self, name: str, shape: tuple[int, ...]) -> range:
        """The rows that must be read. Raises InvalidWeights when the tensor has not the sizes that are divided."""
        rows = range(shape[0] if shape else 1)
        for cut in self.cuts:
            if cut.dim >= len(shape) or shape[cut.dim] != cut.size:
                raise InvalidWeights(f"tensor {name} has shape {list(shape)}: {cut.size} is needed of size {cut.dim}")
            # Of vectors everything is read: they are small, and some formats have them in one piece.
            if cut.dim == 0 and len(shape) > 1:
                rows = cut.hull
        return rows


def piece_of(shard: Shard, name: str) -> Piece | None:
    """The rank's part of a tensor; None when it has none. Unknown tensors are rank 0's, who refuses them."""
    whole = shard.whole
    vocabulary = (Cut(0, whole.vocab_size, (shard.vocabulary,)),)
    stray = Piece(name) if shard.rank == 0 else None
    if name == "model.embed_tokens.weight":
        if shard.is_first:
            return Piece(name, vocabulary)
        return Piece("lm_head.weight", vocabulary) if whole.tie_embeddings and shard.is_last else None
    if name == "lm_head.weight":
        if whole.tie_embeddings:
            return None
        return Piece(name, vocabulary) if shard.is_last else None
    if name == "model.norm.weight":
        return Piece(name) if shard.is_last else None
    match = _LAYER.fullmatch(name)
    if match is None or int(match[1]) >= whole.num_layers:
        return stray
    layer = int(match[1])
    if layer not in shard.layers:
        return None
    return _layer_piece(shard, f"model.layers.{layer - shard.layers.start}.", match[2])


def _layer_piece(shard: Shard, prefix: str, name: str) -> Piece | None:
    whole, name_there = shard.whole, prefix + name
    expert = _EXPERT.fullmatch(name)
    if expert is not None and whole.moe is not None and int(expert[1]) < whole.moe.num_experts:
        down = expert[2] in _DOWN
        cut = Cut(1 if down else 0, whole.moe.intermediate_size, (shard.expert_inner,))
        return Piece(name_there, (cut,)) if int(expert[1]) in shard.experts else None
    stacked = _STACKED.fullmatch(name)
    if stacked is not None and whole.moe is not None:
        return Piece(name_there, _stacked_cuts(shard, stacked[1], whole.moe.num_experts, whole.moe.intermediate_size))
    if name == "self_attn.o_proj.bias":
        return Piece(name_there) if shard.place == 0 else None
    return Piece(name_there, _dense_cuts(shard, name))


def _stacked_cuts(shard: Shard, name: str, num_experts: int, size: int) -> tuple[Cut, ...]:
    experts, inner = Cut(0, num_experts, (shard.experts,)), shard.expert_inner
    if name == "gate_up_proj":
        return experts, Cut(1, 2 * size, _behind((size, size), (inner, inner)))
    return experts, Cut(2 if name == "down_proj" else 1, size, (inner,))


def _dense_cuts(shard: Shard, name: str) -> tuple[Cut, ...]:
    """Of what is neither an expert's nor shared by all ranks of the stage; () of what is shared."""
    whole, head_dim = shard.whole, shard.whole.head_dim
    query, kv = whole.num_heads * head_dim, whole.num_kv_heads * head_dim
    own_query, own_kv = _scaled(shard.heads, head_dim), _scaled(shard.kv_heads, head_dim)
    inner = whole.intermediate_size
    module = name.rpartition(".")[0]
    cuts = {
        "self_attn.q_proj": Cut(0, query, (own_query,)),
        "self_attn.k_proj": Cut(0, kv, (own_kv,)),
        "self_attn.v_proj": Cut(0, kv, (own_kv,)),
        "self_attn.qkv_proj": Cut(0, query + 2 * kv, _behind((query, kv, kv), (own_query, own_kv, own_kv))),
        "self_attn.o_proj": Cut(1, query, (own_query,)),
        "mlp.gate_proj": Cut(0, inner, (shard.inner,)),
        "mlp.up_proj": Cut(0, inner, (shard.inner,)),
        "mlp.gate_up_proj": Cut(0, 2 * inner, _behind((inner, inner), (shard.inner, shard.inner))),
        "mlp.down_proj": Cut(1, inner, (shard.inner,)),
    }
    return (cuts[module],) if module in cuts else ()


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _behind(sizes: Sequence[int], parts: Sequence[range]) -> tuple[range, ...]:
    """Parts of tensors that lie behind each other, in places of the joined one."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(range(start + part.start, start + part.stop) for start, part in zip(starts, parts, strict=True))


def rows_wanted(shard: Shard, canonical: Callable[[str], str]) -> RowsWanted:
    """canonical: from a name as it is stored to Hugging Face's."""

    def wanted(name: str, shape: tuple[int, ...]) -> range | None:
        piece = piece_of(shard, canonical(name))
        return None if piece is None else piece.rows(name, shape)

    return wanted


class ShardSource:
    """A TensorSource of a rank's part, over a source whose tensors have the rows that the rank wants and no others."""

    def __init__(self, source: TensorSource, shard: Shard) -> None:
        self.centred_norms = source.centred_norms
        self._source = source
        pieces = {name: piece_of(shard, name) for name in source.names()}
        self._pieces = {piece.name: (name, piece) for name, piece in pieces.items() if piece is not None}

    def names(self) -> set[str]:
        return set(self._pieces)

    def read(self, name: str) -> torch.Tensor:
        stored, piece = self._pieces[name]
        tensor = self._source.read(stored)
        for cut in piece.cuts:
            trimmed = cut.dim == 0 and tensor.dim() > 1
            tensor = cut.of(tensor, cut.hull.start if trimmed else 0)
        return tensor
