"""Where a replica's memory goes, and how much of a device its block pool may take. Pure arithmetic, torch-free.

Everything is in bytes of the memory that the model runs in: host memory on CPU, the GPU's on CUDA. On CPU the pool has
the size that the operator gave; on CUDA it gets a share of what weights and the largest step leave.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.blocks import BLOCK_TOKENS
from services.worker.model.config import ModelConfig
from services.worker.model.layout import KvLayout


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """What a loaded replica takes of `total_bytes` on `device`.

    reserve_bytes: what the largest step needs beside weights and pool; measured on CUDA, a bound on CPU. max_context:
    tokens that the model is served with. staging_bytes: host memory in which transfers of a device pool stop over; 0
    where the pool itself is shared memory. adapter_bytes: what resident adapters may take.
    """

    device: str
    total_bytes: int
    weight_bytes: int
    reserve_bytes: int
    block_bytes: int
    num_blocks: int
    max_context: int
    staging_bytes: int = 0
    adapter_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """The block pool."""
        return self.num_blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the pool holds at once."""
        return self.num_blocks * BLOCK_TOKENS

    @property
    def largest_context(self) -> int:
        """Tokens of the largest request that is admitted, prompt and output together."""
        return min(self.max_context, self.kv_tokens)

    @property
    def unused_bytes(self) -> int:
        """What is left on the device; negative where it is promised more than it has."""
        return self.total_bytes - self.weight_bytes - self.reserve_bytes - self.adapter_bytes - self.kv_bytes


def pool_blocks(layout: KvLayout, *, free_bytes: int, reserve_bytes: int, fraction: float) -> int:
    """Blocks of a pool that takes `fraction` of what a step's reserve leaves of the free memory; 0 when none fits."""
    return max(0, layout.num_blocks(int(max(0, free_bytes - reserve_bytes) * fraction)))


def step_bytes(config: ModelConfig, *, tokens: int, logit_rows: int, element_bytes: int) -> int:
    """A bound on a step's activations, as if every buffer of one layer lived at once.

    Float32 are: the residual stream, QKV before rotation, gate and up, an output to be added, logits. In the compute
    dtype are: a normalised input, the query, attention's result, the activation.
    """
    query = config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    intermediate = config.intermediate_size
    if config.moe is not None:
        intermediate = max(intermediate, config.moe.experts_per_token * config.moe.intermediate_size)
    wide = 2 * config.hidden_size + qkv + 2 * intermediate
    narrow = config.hidden_size + 2 * query + intermediate
    return tokens * (4 * wide + element_bytes * narrow) + 4 * logit_rows * config.vocab_size
