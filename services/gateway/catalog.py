"""The models of the mesh as this gateway sees them: what routers report joined with the tokenizers at hand.

A public name may have several versions, one for each digest that its workers have. The last report is kept when no
router answers. A version whose workers carry another tokenizer than ours is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import structlog
from kvmesh.v1.inference_pb2 import ModelInfo, ModelVersionInfo
from kvmesh.v1.router_pb2 import ModelSnapshot, ModelTraffic, ServedModel

from services.gateway.adapters import SEPARATOR, Adapters, AdapterView, base_and_adapter
from services.gateway.errors import ModelNotFound, ModelUnavailable
from services.gateway.planning import ModelView
from services.gateway.text.text_model import TextModel
from services.gateway.versions import VersionView, Views, resolved

_LABEL_DIGITS = 12
_log = structlog.get_logger("gateway.catalog")


@dataclass(frozen=True, slots=True)
class _Version:
    """A digest that workers have. weight: 0 for no traffic; without traffic weights its ready replicas."""

    served: ServedModel
    label: str
    weight: float

    @property
    def takes_requests(self) -> bool:
        return self.weight > 0 and self.served.ready_replicas > 0


class ModelCatalog:
    """Owner of the served models. `views` is replaced, never changed."""

    def __init__(self, texts: Iterable[TextModel], on_demand: Collection[str] = ()) -> None:
        """on_demand: names of models that are loaded when they are asked for."""
        self.texts = {text.name: text for text in texts}
        self.on_demand = frozenset(on_demand)
        # Models by their other names; by the empty one the default model.
        self.aliases: dict[str, str] = {}
        # Of each name the versions that requests may get.
        self.views: Views = {}
        # Those that requests may name.
        self.adapters: Adapters = {}
        # Versions with traffic that no worker is ready for, or whose tokenizer this gateway has not: others get it.
        self.unserved: frozenset[tuple[str, str]] = frozenset()
        self._served: dict[str, tuple[_Version, ...]] = {}
        self._mismatched: set[str] = set()
        self._reported: set[tuple[str, bytes]] = set()

    def update(self, snapshot: ModelSnapshot) -> None:
        """Take a router's report."""
        self.aliases = {one.name: one.model for one in snapshot.aliases}
        traffic = {one.name: one for one in snapshot.traffic}
        usable = [model for model in snapshot.models if self._is_usable(model)]
        names = {model.name for model in usable}
        self._mismatched = {m.name for m in snapshot.models if self._has_other_tokenizer(m)} - names
        self._served = {
            name: _versions([model for model in usable if model.name == name], traffic.get(name)) for name in names
        }
        self.views = {name: views for name in self._served if (views := self._views_of(name))}
        self.adapters = {
            f"{one.model}{SEPARATOR}{one.name}": AdapterView(one.digest, one.rank, one.path, one.created_s)
            for one in snapshot.adapters
        }
        self._report_versions(snapshot)
        self._report_shortfalls(traffic.values())

    def resolve(self, name: str) -> str:
        """The model that a name stands for, which may be the name itself; an empty one: there is no default model."""
        return resolved(name, self.texts, self.aliases)

    def serves(self, name: str) -> bool:
        """Whether a request for the model would be taken now."""
        return any(version.takes_requests for version in self._served.get(name, ()))

    def text_model(self, name: str) -> TextModel:
        """The text side of a model that is served or can be loaded. Raises ModelNotFound or ModelUnavailable."""
        base = self.base(name)
        if base not in self.on_demand:
            self.check(base)
        return self.texts[base]

    def base(self, name: str) -> str:
        """The base model of an adapter's name; other names are their own."""
        return base_and_adapter(name, self.views, self.adapters)[0]

    def check(self, name: str) -> None:
        """Raise ModelNotFound or ModelUnavailable unless requests for `name` can be prepared."""
        name = self.base(name)
        if name in self.views:
            return
        if name in self._mismatched:
            raise ModelUnavailable(
                f"the workers of the model {name!r} have another tokenizer than this gateway", "model"
            )
        if name in self._served and name not in self.on_demand:
            raise ModelUnavailable(f"no worker has a version of the model {name!r} that gets traffic", "model")
        raise _missing(name, is_configured=name in self.texts, is_served=name in {n for n, _ in self._reported})

    def label(self, name: str, digest: bytes) -> str:
        """What a version is called in metrics and logs: its label, else the first digits of its digest."""
        found = (one.label for one in self._served.get(name, ()) if one.served.digest == digest)
        return next(found, "") or digest.hex()[:_LABEL_DIGITS]

    def info(self, name: str) -> ModelInfo:
        """Public description. Raises ModelNotFound or ModelUnavailable."""
        self.check(name)
        base, adapter = base_and_adapter(name, self.views, self.adapters)
        if adapter is not None:
            described = self.info(base)
            described.name, described.parent, described.created_s = name, base, adapter.created_s
            described.adapter_digest, described.adapter_rank = adapter.digest.hex(), adapter.rank
            return described
        versions = self._served[name]
        shares = _shares(versions)
        main = max(zip(shares, versions, strict=True), key=lambda pair: pair[0])[1].served
        return ModelInfo(
            name=name,
            digest=main.digest.hex(),
            context_length=main.context_length,
            dtype=main.dtype,
            weight_format=main.weight_format,
            ready_replicas=sum(one.served.ready_replicas for one in versions if one.weight > 0),
            created_s=main.created_s,
            versions=[_version_info(one, share) for one, share in zip(versions, shares, strict=True)],
            state="ready" if self.serves(name) else "unavailable",
        )

    @property
    def is_ready(self) -> bool:
        """Whether a request for some model would be served, be it after a load."""
        return bool(self.on_demand) or any(map(self.serves, self._served))

    def _views_of(self, name: str) -> tuple[VersionView, ...]:
        """Without a ready worker a model that is loaded on demand has none: whoever wants it is to wait."""
        return _views(self._served[name]) if name not in self.on_demand or self.serves(name) else ()

    def _is_usable(self, model: ServedModel) -> bool:
        return model.name in self.texts and not self._has_other_tokenizer(model)

    def _has_other_tokenizer(self, model: ServedModel) -> bool:
        text = self.texts.get(model.name)
        return text is not None and bool(model.tokenizer_digest) and model.tokenizer_digest != text.digest

    def _report_versions(self, snapshot: ModelSnapshot) -> None:
        known = {(model.name, model.digest): model for model in snapshot.models}
        for key in known.keys() - self._reported:
            model = known[key]
            if self._has_other_tokenizer(model):
                _log.error("tokenizer_mismatch", model=model.name, digest=model.digest.hex())
            elif model.name not in self.texts:
                detail = "served by the mesh, not among this gateway's models"
                _log.error("no_tokenizer", model=model.name, detail=detail)
            else:
                digest, length = model.digest.hex(), model.context_length
                _log.info("model_seen", model=model.name, digest=digest, context_length=length)
        self._reported = set(known)

    def _report_shortfalls(self, traffic: Iterable[ModelTraffic]) -> None:
        able = {
            (n, one.served.digest) for n, versions in self._served.items() for one in versions if one.takes_requests
        }
        unserved = frozenset(
            (one.name, version.version)
            for one in traffic
            for version in one.versions
            if version.weight and one.name in self.texts and (one.name, version.digest) not in able
        )
        for name, version in unserved - self.unserved:
            _log.warning("version_unserved", model=name, version=version, detail="its requests go to other versions")
        for name, version in self.unserved - unserved:
            _log.info("version_served_again", model=name, version=version)
        self.unserved = unserved


def _versions(models: list[ServedModel], traffic: ModelTraffic | None) -> tuple[_Version, ...]:
    shares = {one.digest: one for one in traffic.versions} if traffic is not None else {}
    if traffic is not None and traffic.weighted:
        weights = [float(shares[model.digest].weight) if model.digest in shares else 0.0 for model in models]
    elif any(model.ready_replicas for model in models):
        weights = [float(model.ready_replicas) for model in models]
    else:
        weights = [1.0] * len(models)
    labels = [shares[model.digest].version if model.digest in shares else "" for model in models]
    return tuple(_Version(*parts) for parts in zip(models, labels, weights, strict=True))


def _views(versions: tuple[_Version, ...]) -> tuple[VersionView, ...]:
    """Those that take requests; where none does, those that would once they have a ready worker."""
    able = [one for one in versions if one.takes_requests] or [one for one in versions if one.weight > 0]
    if able:
        return tuple(VersionView(_view(one.served), one.weight) for one in able)
    return ()


def _shares(versions: tuple[_Version, ...]) -> list[float]:
    """Of each version its part of the requests."""
    weights = [one.weight if one.takes_requests else 0.0 for one in versions]
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def _version_info(version: _Version, share: float) -> ModelVersionInfo:
    served = version.served
    return ModelVersionInfo(
        version=version.label,
        digest=served.digest.hex(),
        share=share,
        ready_replicas=served.ready_replicas,
        weight_format=served.weight_format,
        dtype=served.dtype,
    )


def _view(model: ServedModel) -> ModelView:
    return ModelView(
        name=model.name,
        digest=model.digest,
        context_length=model.context_length,
        kv_dtype=model.kv_dtype,
        block_tokens=model.block_tokens,
        layout_version=model.layout_version,
        vocab_size=model.vocab_size,
        pooling=model.pooling,
    )


def _missing(name: str, *, is_configured: bool, is_served: bool) -> ModelNotFound | ModelUnavailable:
    """The error for a model that lacks a tokenizer here, a worker, or both."""
    if is_configured:
        return ModelUnavailable(f"no worker serves the model {name!r} at the moment", "model")
    if is_served:
        return ModelUnavailable(f"this gateway has no tokenizer for the model {name!r}", "model")
    return ModelNotFound(f"The model {name[:100]!r} does not exist", "model")
