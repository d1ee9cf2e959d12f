"""Typed reading of the metadata of one architecture in a GGUF file, and its `rope.` fields as a RopeConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.model.config import MAX_LAYERS, RopeConfig, RopeScaling
from services.worker.model.errors import UnsupportedModel
from services.worker.model.gguf_file import GgufFile
from services.worker.model.hf_fields import LARGEST, LARGEST_INTEGER, shown
from services.worker.model.rope import longrope_attention, yarn_attention

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset((ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS))

Fields = Mapping[str, Any]


class GgufFields:
    """The metadata entries `<architecture>.<name>` of a file, by name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.prefix = f"{architecture}."
        self.values: Fields = {
            name[len(self.prefix) :]: value for name, value in file.metadata.items() if name.startswith(self.prefix)
        }

    def integer(self, name: str, default: int | None = None) -> int:
        """Raises UnsupportedModel where it is absent without a default, or no integer."""
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UnsupportedModel(f"GGUF field {self.prefix}{name} = {shown(value)}: an integer is needed")
        if abs(value) > LARGEST_INTEGER:
            raise UnsupportedModel(f"GGUF field {self.prefix}{name} = {shown(value)}: out of range")
        return value

    def positive_integer(self, name: str, default: int | None = None) -> int:
        """As `integer`, over zero."""
        value = self.integer(name, default)
        if value < 1:
            raise UnsupportedModel(f"GGUF field {self.prefix}{name} = {value}: must be positive")
        return value

    def num_layers(self) -> int:
        """How many layers there are: a count that lists may be made of."""
        value = self.positive_integer("block_count")
        if value > MAX_LAYERS:
            raise UnsupportedModel(f"GGUF field {self.prefix}block_count = {value}: at most {MAX_LAYERS}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """As `integer`; the shortest decimal that its float32 can mean, which is what its author wrote."""
        value = self.values.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedModel(f"GGUF field {self.prefix}{name} = {shown(value)}: a number is needed")
        if not -LARGEST <= value <= LARGEST:
            raise UnsupportedModel(f"GGUF field {self.prefix}{name} = {value}: out of range")
        return float(f"{value:.6g}")

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Raises UnsupportedModel for a field that is set to something and not known."""
        for name in sorted(self.values.keys() - known):
            if self.values[name]:
                raise UnsupportedModel(f"GGUF field {self.prefix}{name} = {shown(self.values[name])} is not supported")

    def rope(self, head_dim: int) -> RopeConfig:
        """The rotary embedding of all layers, or of those without a window."""
        rotary_dim = self.integer("rope.dimension_count", head_dim)
        return RopeConfig(self.number("rope.freq_base", 10000.0), rotary_dim, self._scaling())

    def _scaling(self) -> RopeScaling | None:
        kind = self.values.get("rope.scaling.type", "none")
        if ROPE_FACTORS in self.file.tensors:
            if kind != "none":
                raise UnsupportedModel(f"rope scaling {shown(kind)} together with {ROPE_FACTORS} is not supported")
            return RopeScaling("factors", frequency_divisors=self._divisors(ROPE_FACTORS))
        if LONG_FACTORS in self.file.tensors and kind in ("none", "longrope"):
            return self._longrope()
        if kind == "none":
            return None
        if kind == "linear":
            return RopeScaling("linear", factor=self.number("rope.scaling.factor"))
        if kind == "yarn":
            return self._yarn()
        raise UnsupportedModel(f"rope scaling {shown(kind)} is not supported in this GGUF file")

    def _longrope(self) -> RopeScaling:
        original = self.integer("rope.scaling.original_context_length")
        if original < 2:
            raise UnsupportedModel(
                f"GGUF field {self.prefix}rope.scaling.original_context_length = {original}: too small"
            )
        factor = self.integer("context_length") / original
        attention = self.number("rope.scaling.attn_factor", 0.0) or longrope_attention(factor, original)
        return RopeScaling(
            "longrope",
            factor=factor,
            original_max_positions=original,
            attention_factor=attention,
            frequency_divisors=self._divisors(LONG_FACTORS),
            short_divisors=self._divisors(SHORT_FACTORS),
        )

    def _yarn(self) -> RopeScaling:
        factor = self.number("rope.scaling.factor")
        for name, only in (("rope.scaling.attn_factor", 1.0), ("rope.scaling.yarn_ext_factor", 1.0)):
            if self.number(name, only) != only:
                raise UnsupportedModel(
                    f"GGUF field {self.prefix}{name} = {shown(self.values[name])}: only {only} is supported"
                )
        return RopeScaling(
            "yarn",
            factor=factor,
            original_max_positions=self.integer("rope.scaling.original_context_length", self.integer("context_length")),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=yarn_attention(factor),
        )

    def _divisors(self, name: str) -> tuple[float, ...]:
        if name not in self.file.tensors:
            raise UnsupportedModel(f"rope scaling: tensor {name} is missing")
        return tuple(float(value) for value in self.file.tensors[name].dequantise().ravel())
