"""What is needed to execute a Llama-family decoder, and the rules on what cannot be executed.

`ModelConfig` comes from a Hugging Face config.json (hf_config.py) or from GGUF metadata (gguf_config.py). Everything
the forward pass does not implement is refused here or there with UnsupportedModel: a model runs as its authors meant or
not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.worker.model.errors import UnsupportedModel

# The kernels' vectors are sixteen lanes wide, and a head's working set lies on the stack.
LANES = 16
MAX_HEAD_DIM = 256
MAX_HEADS_PER_KV_HEAD = 96


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies differ from theta ** (-2 i / head_dim).

    linear: divided by `factor`. llama3: as Llama 3.1 (low frequencies divided by `factor`, high ones kept, a smooth
    ramp between). factors: divided one by one by `frequency_divisors` [head_dim / 2] (GGUF stores llama3 this way).
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    frequency_divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one model. Construction validates; raises UnsupportedModel."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    tie_embeddings: bool
    attention_bias: bool

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads", "vocab_size", "max_positions"):
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"{name} = {getattr(self, name)}: must be positive")
        for name in ("hidden_size", "head_dim", "intermediate_size"):
            value = getattr(self, name)
            if value < LANES or value % LANES:
                raise UnsupportedModel(f"{name} = {value}: must be a multiple of {LANES}")
        if self.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModel(f"head_dim = {self.head_dim}: at most {MAX_HEAD_DIM}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"num_heads = {self.num_heads}: not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.num_heads // self.num_kv_heads > MAX_HEADS_PER_KV_HEAD:
            raise UnsupportedModel(f"num_heads = {self.num_heads}: over {MAX_HEADS_PER_KV_HEAD} for one KV head")
        divisors = self.rope_scaling.frequency_divisors if self.rope_scaling else ()
        if divisors and len(divisors) != self.head_dim // 2:
            raise UnsupportedModel(f"rotary frequency factors: {len(divisors)} instead of {self.head_dim // 2}")
