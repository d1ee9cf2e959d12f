"""The models as clients are told of them: those that serve, those that a request would have loaded, and other names."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.v1.inference_pb2 import ModelInfo

from services.gateway.catalog import ModelCatalog
from services.gateway.cold_starts import ColdStarts


@dataclass(frozen=True, slots=True)
class ModelListing:
    """A view of the two that know."""

    catalog: ModelCatalog
    cold: ColdStarts

    def infos(self) -> list[ModelInfo]:
        """All of them and their adapters by name, then aliases by name; the default model has no line of its own."""
        names = {*self.catalog.views, *self.cold.models}
        adapters = [name for name in self.catalog.adapters if self.catalog.base(name) in names]
        models = {name: self.info(name) for name in sorted({*names, *adapters})}
        aliases = [
            self.info(alias) for alias, model in sorted(self.catalog.aliases.items()) if alias and model in models
        ]
        return [*models.values(), *(one for one in aliases if one.alias_of)]

    def info(self, name: str) -> ModelInfo:
        """One of them. Raises ModelNotFound or ModelUnavailable."""
        model = self.catalog.resolve(name)
        base = self.catalog.base(model)
        if base in self.catalog.views or base not in self.cold.models:
            info = self.catalog.info(model)
        else:
            state = "loading" if self.cold.is_wanted(base) else "unloaded"
            parent = base if base != model else ""
            info = ModelInfo(name=model, parent=parent, state=state, cold_start_s=self.cold.forecast_s(base))
        info.call_format = self.catalog.texts[base].calls.format.name
        if model != name:
            info.name, info.alias_of = name, model
        return info
