"""What is needed to execute a Llama-family decoder, and the rules on what cannot be executed.

`ModelConfig` comes from a Hugging Face config.json (hf_config.py) or from GGUF metadata (gguf_config.py). Everything
the forward pass does not implement is refused here or there with UnsupportedModel: a model runs as its authors meant or
not at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from services.worker.model.errors import UnsupportedModel

# The kernels' vectors are sixteen lanes wide, and a head's working set lies on the stack.
LANES = 16
MAX_HEAD_DIM = 256
MAX_HEADS_PER_KV_HEAD = 96
# Far beyond any model: what a damaged file cannot make us allocate.
MAX_LAYERS = 4096
MAX_EXPERTS = 65_536
MAX_POSITIONS = 2**24
# What frequencies are divided by.
_SMALLEST = 1e-30
_POSITIVE_IN_SCALING = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
    *("beta_fast", "beta_slow", "attention_factor"),
)
# Of which scalings, and where they have them.
_DIVISORS = {"factors": ("frequency_divisors",), "longrope": ("frequency_divisors", "short_divisors")}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies differ from theta ** (-2 i / rotary_dim).

    linear: divided by `factor`. dynamic (NTK) and yarn (Peng et al., 2023): by the served context length, resp. by
    wavelength. llama3: as Llama 3.1 (low frequencies divided by `factor`, high ones kept, a smooth ramp between).
    factors: divided one by one by `frequency_divisors` [rotary_dim / 2] (GGUF stores llama3 this way). longrope
    (Phi-3): likewise where more than `original_max_positions` are served, else by `short_divisors`. truncate: of yarn,
    its ramp begins and ends at whole pairs. `attention_factor` multiplies cosine and sine.
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3", "factors", "longrope"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    frequency_divisors: tuple[float, ...] = ()
    short_divisors: tuple[float, ...] = ()
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of a kind of layer: the first `rotary_dim` elements of a head turn, halves apart."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts in place of the MLP of every layer whose `sparse` is true.

    Router: softmax over all experts in float32, the `experts_per_token` largest, renormalised to one where
    `renormalise`. intermediate_size: of one expert. A rank of a group may hold only num_held experts (0: all), from
    first_held on; it routes to all.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalise: bool
    sparse: tuple[bool, ...]
    first_held: int = 0
    num_held: int = 0

    @property
    def held(self) -> range:
        """The experts whose weights are here."""
        return range(self.first_held, self.first_held + (self.num_held or self.num_experts))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one model. Construction validates; raises UnsupportedModel.

    windows: for each layer how many of the latest positions a token sees, itself included; 0: all. rope_local: of the
    layers with a window, where it differs. norm weights are taken as they multiply (Gemma's one is added when they are
    loaded). post_norms: the outputs of attention and of the MLP are normalised before they join the residual stream.
    softcaps: cap * tanh(x / cap) of attention scores and of logits; 0: none. embedding_scale multiplies embeddings.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    windows: tuple[int, ...] = ()
    rope_local: RopeConfig | None = None
    moe: MoeConfig | None = None

    def window(self, layer: int) -> int:
        """How many of the latest positions the layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    def layer_rope(self, layer: int) -> RopeConfig:
        """The rotary embedding of a layer."""
        return self.rope_local if self.rope_local is not None and self.window(layer) else self.rope

    def is_sparse(self, layer: int) -> bool:
        """Whether a mixture of experts stands in for the layer's MLP."""
        return self.moe is not None and self.moe.sparse[layer]

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads", "vocab_size", "max_positions"):
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"{name} = {getattr(self, name)}: must be positive")
        for name, most in (("num_layers", MAX_LAYERS), ("max_positions", MAX_POSITIONS)):
            if getattr(self, name) > most:
                raise UnsupportedModel(f"{name} = {getattr(self, name)}: at most {most}")
        widths = {name: getattr(self, name) for name in ("hidden_size", "head_dim", "intermediate_size")}
        if self.moe is not None:
            widths["moe.intermediate_size"] = self.moe.intermediate_size
        for name, value in widths.items():
            if value < LANES or value % LANES:
                raise UnsupportedModel(f"{name} = {value}: must be a multiple of {LANES}")
        if self.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModel(f"head_dim = {self.head_dim}: at most {MAX_HEAD_DIM}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"num_heads = {self.num_heads}: not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.num_heads // self.num_kv_heads > MAX_HEADS_PER_KV_HEAD:
            raise UnsupportedModel(f"num_heads = {self.num_heads}: over {MAX_HEADS_PER_KV_HEAD} for one KV head")
        self._check_constants()
        for rope in (self.rope, self.rope_local):
            self._check_rope(rope)
        self._check_moe()
        if any(window < 0 for window in self.windows):
            raise UnsupportedModel(f"windows: {min(self.windows)} positions")
        for name, values in (("windows", self.windows), ("moe.sparse", self.moe.sparse if self.moe else ())):
            if values and len(values) != self.num_layers:
                raise UnsupportedModel(f"{name}: {len(values)} values for {self.num_layers} layers")

    def _check_constants(self) -> None:
        for name in ("rms_norm_eps", "attention_scale", "embedding_scale", "attention_softcap", "logit_softcap"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise UnsupportedModel(f"{name} = {value}: must be a number and not negative")

    def _check_rope(self, rope: RopeConfig | None) -> None:
        if rope is None:
            return
        if not 0 < rope.rotary_dim <= self.head_dim or rope.rotary_dim % 2:
            raise UnsupportedModel(f"rotary_dim = {rope.rotary_dim}: must be even and at most {self.head_dim}")
        scaling = rope.scaling
        if not 1.0 < rope.theta < math.inf:
            raise UnsupportedModel(f"rotary embedding: theta {rope.theta}: must be over 1")
        for name in _POSITIVE_IN_SCALING if scaling else ():
            if not _SMALLEST <= getattr(scaling, name) < math.inf:
                raise UnsupportedModel(f"rotary embedding: {name} = {getattr(scaling, name)}: must be positive")
        for name in _DIVISORS.get(scaling.kind, ()) if scaling else ():
            divisors = getattr(scaling, name)
            if len(divisors) != rope.rotary_dim // 2:
                raise UnsupportedModel(f"rotary frequency factors: {len(divisors)} instead of {rope.rotary_dim // 2}")
            wrong = next((one for one in divisors if not _SMALLEST <= one < math.inf), None)
            if wrong is not None:
                raise UnsupportedModel(f"rotary frequency factors: {wrong} is not positive")

    def _check_moe(self) -> None:
        moe = self.moe
        if moe is None:
            return
        if not 0 < moe.experts_per_token <= moe.num_experts:
            raise UnsupportedModel(f"experts_per_token = {moe.experts_per_token}: there are {moe.num_experts} experts")
        if moe.num_experts > MAX_EXPERTS:
            raise UnsupportedModel(f"num_experts = {moe.num_experts}: at most {MAX_EXPERTS}")
