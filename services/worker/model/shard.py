"""How a model divides over the ranks of a group: which layers, heads, inner columns, experts and tokens each one has.

Ranks are numbered stage by stage (pipeline parallel; Huang et al., 2019), a stage being tensor * expert ranks that
share its layers. Attention, dense MLPs and the vocabulary divide over all ranks of a stage (tensor parallel; Shoeybi et
al., 2019): query heads with their KV head, inner columns, rows of embedding and head. Experts divide over `expert`
parts of a stage, and each one's inner columns over the `tensor` ranks of its part. Every rank of a stage has its norms
and routers. What a rank has is a smaller model of the same kind, `Shard.config`. Pure; knows of no process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.worker.model.config import LANES, ModelConfig
from services.worker.model.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Ranks by kind of parallelism; their product is how many there are."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def stage_size(self) -> int:
        """Ranks that share the layers of a stage."""
        return self.tensor * self.expert

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.pipeline * self.stage_size

    @property
    def arithmetic(self) -> str:
        """What tells its results from those of one rank to the last bit; "" for stages, which change none."""
        return "".join(f" {kind}{size}" for kind, size in (("tp", self.tensor), ("ep", self.expert)) if size > 1)

    def check(self, config: ModelConfig) -> None:
        """Raise UnsupportedModel, naming the setting, where the model does not divide so."""
        if self.pipeline > config.num_layers:
            raise UnsupportedModel(f"pipeline_parallel={self.pipeline}: the model has {config.num_layers} layers")
        if self.expert > 1 and (config.moe is None or not any(config.moe.sparse)):
            raise UnsupportedModel(f"expert_parallel={self.expert}: the model has no experts")
        if config.moe is not None and config.moe.num_experts % self.expert:
            raise UnsupportedModel(f"expert_parallel={self.expert}: does not divide {config.moe.num_experts} experts")
        if config.num_kv_heads % self.stage_size:
            raise UnsupportedModel(f"{self._stage_name}: does not divide {config.num_kv_heads} KV heads")
        if _has_dense(config):
            _check_width(self._stage_name, self.stage_size, config.intermediate_size)
        if config.moe is not None:
            _check_width(f"tensor_parallel={self.tensor}", self.tensor, config.moe.intermediate_size)

    @property
    def _stage_name(self) -> str:
        if self.expert == 1:
            return f"tensor_parallel={self.tensor}"
        return f"tensor_parallel={self.tensor} times expert_parallel={self.expert}"


def _has_dense(config: ModelConfig) -> bool:
    return not all(config.is_sparse(layer) for layer in range(config.num_layers))


def _check_width(setting: str, parts: int, width: int) -> None:
    if width % (parts * LANES):
        raise UnsupportedModel(f"{setting}: does not divide {width} inner columns into multiples of {LANES}")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model. Construction raises UnsupportedModel where the model does not divide so."""

    whole: ModelConfig
    parallelism: Parallelism
    rank: int

    def __post_init__(self) -> None:
        self.parallelism.check(self.whole)

    @property
    def stage(self) -> int:
        """Its pipeline stage."""
        return self.rank // self.parallelism.stage_size

    @property
    def place(self) -> int:
        """Its number among the ranks of its stage."""
        return self.rank % self.parallelism.stage_size

    @property
    def is_first(self) -> bool:
        """Whether its stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage has the last norm and the head."""
        return self.stage == self.parallelism.pipeline - 1

    @property
    def layers(self) -> range:
        """Layers of its stage."""
        return _part(self.whole.num_layers, self.parallelism.pipeline, self.stage)

    @property
    def heads(self) -> range:
        """Query heads."""
        return self._of_stage(self.whole.num_heads)

    @property
    def kv_heads(self) -> range:
        """KV heads, those of its query heads."""
        return self._of_stage(self.whole.num_kv_heads)

    @property
    def inner(self) -> range:
        """Inner columns of dense MLPs."""
        return self._of_stage(self.whole.intermediate_size)

    @property
    def vocabulary(self) -> range:
        """Rows of embedding and head."""
        return self._of_stage(self.whole.vocab_size)

    @property
    def experts(self) -> range:
        """Experts whose weights it has."""
        moe = self.whole.moe
        return _part(moe.num_experts if moe else 0, self.parallelism.expert, self.place // self.parallelism.tensor)

    @property
    def expert_inner(self) -> range:
        """Inner columns of each of its experts."""
        size = self.whole.moe.intermediate_size if self.whole.moe else 0
        return _part(size, self.parallelism.tensor, self.place % self.parallelism.tensor)

    @property
    def config(self) -> ModelConfig:
        """The part as a model: its decoder's shapes."""
        whole, layers = self.whole, self.layers
        moe = whole.moe
        if moe is not None:
            moe = replace(
                moe,
                intermediate_size=len(self.expert_inner),
                sparse=moe.sparse[layers.start : layers.stop],
                first_held=self.experts.start,
                num_held=len(self.experts),
            )
        return replace(
            whole,
            num_layers=len(layers),
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner) if _has_dense(whole) else whole.intermediate_size,
            vocab_size=len(self.vocabulary),
            windows=whole.windows[layers.start : layers.stop],
            moe=moe,
            # A last stage that is not the first has the shared tensor as its head alone.
            tie_embeddings=whole.tie_embeddings and self.is_first,
            # Added once.
            output_bias=whole.output_bias and self.place == 0,
        )

    def _of_stage(self, size: int) -> range:
        return _part(size, self.parallelism.stage_size, self.place)


def _part(size: int, parts: int, index: int) -> range:
    """One of `parts` consecutive parts, as even as can be."""
    return range(size * index // parts, size * (index + 1) // parts)


@dataclass(frozen=True, slots=True)
class ShareBytes:
    """Bytes of parameters that a rank should have: its share of what divides, and what each rank of a stage has."""

    divided: int
    replicated: int

    @property
    def total(self) -> int:
        """Both."""
        return self.divided + self.replicated


def share_bytes(shard: Shard, element_bytes: int) -> ShareBytes:
    """What the rank's stage holds in matrices, divided by its ranks, rounded up; norms (float32) and routers beside it.

    The vocabulary counts with the ceiling of its rows by the ranks, once where first and last stage share one tensor
    and are the same stage.
    """
    whole, ranks = shard.whole, shard.parallelism.stage_size
    hidden, tied_here = whole.hidden_size, whole.tie_embeddings and shard.is_first
    query, kv = whole.num_heads * whole.head_dim, whole.num_kv_heads * whole.head_dim
    tables = int(shard.is_first) + int(shard.is_last and not tied_here)
    divided = tables * -(-whole.vocab_size // ranks) * hidden * element_bytes
    replicated = 4 * hidden * shard.is_last
    for layer in shard.layers:
        bias = 4 * (query + 2 * kv) if whole.qkv_bias else 0
        elements = (2 * query + 2 * kv) * hidden + _mlp_elements(whole, layer)
        divided += -(-(elements * element_bytes + bias) // ranks)
        norms = hidden * (4 if whole.post_norms else 2) + (2 * whole.head_dim if whole.qk_norm else 0)
        norms += hidden if whole.output_bias else 0
        router = whole.moe.num_experts * hidden if whole.moe is not None and whole.is_sparse(layer) else 0
        replicated += 4 * norms + element_bytes * router
    return ShareBytes(divided, replicated)


def _mlp_elements(config: ModelConfig, layer: int) -> int:
    if config.moe is not None and config.is_sparse(layer):
        return 3 * config.hidden_size * config.moe.intermediate_size * config.moe.num_experts
    return 3 * config.hidden_size * config.intermediate_size
