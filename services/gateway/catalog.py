"""The models of the mesh as this gateway sees them: what routers report joined with the tokenizers at hand.

The last report is kept when no router answers. A model whose workers carry another tokenizer than ours is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog
from kvmesh.v1.inference_pb2 import ModelInfo
from kvmesh.v1.router_pb2 import ModelSnapshot, ServedModel

from services.gateway.errors import ModelNotFound, ModelUnavailable
from services.gateway.planning import ModelView
from services.gateway.text.text_model import TextModel

_log = structlog.get_logger("gateway.catalog")


class ModelCatalog:
    """Owner of the served models. `views` is replaced, never changed."""

    def __init__(self, texts: Iterable[TextModel]) -> None:
        self.texts = {text.name: text for text in texts}
        self.views: dict[str, ModelView] = {}
        self._served: dict[str, ServedModel] = {}
        self._mismatched: set[str] = set()
        self._reported: set[str] = set()

    def update(self, snapshot: ModelSnapshot) -> None:
        """Take a router's report."""
        known = {model.name: model for model in snapshot.models}
        self._mismatched = {name for name, model in known.items() if self._has_other_tokenizer(model)}
        self._served = {n: m for n, m in known.items() if n in self.texts and n not in self._mismatched}
        self.views = {name: _view(model) for name, model in self._served.items()}
        self._report(known)

    def text_model(self, name: str) -> TextModel:
        """The text side of a served model. Raises ModelNotFound or ModelUnavailable."""
        self.check(name)
        return self.texts[name]

    def check(self, name: str) -> None:
        """Raise ModelNotFound or ModelUnavailable unless requests for `name` can be prepared."""
        if name in self._mismatched:
            raise ModelUnavailable(
                f"the workers of the model {name!r} have another tokenizer than this gateway", "model"
            )
        if name not in self._served:
            raise _missing(name, is_configured=name in self.texts, is_served=name in self._reported)

    def info(self, name: str) -> ModelInfo:
        """Public description. Raises ModelNotFound or ModelUnavailable."""
        self.check(name)
        model = self._served[name]
        return ModelInfo(
            name=name,
            digest=model.digest.hex(),
            context_length=model.context_length,
            dtype=model.dtype,
            weight_format=model.weight_format,
            ready_replicas=model.ready_replicas,
            created_s=model.created_s,
        )

    def infos(self) -> list[ModelInfo]:
        """All served models, by name."""
        return [self.info(name) for name in sorted(self._served)]

    @property
    def is_ready(self) -> bool:
        """Whether a request for some model would be served."""
        return any(model.ready_replicas for model in self._served.values())

    def _has_other_tokenizer(self, model: ServedModel) -> bool:
        text = self.texts.get(model.name)
        return text is not None and bool(model.tokenizer_digest) and model.tokenizer_digest != text.digest

    def _report(self, known: dict[str, ServedModel]) -> None:
        for name in known.keys() - self._reported:
            if name in self._mismatched:
                _log.error("tokenizer_mismatch", model=name)
            elif name not in self.texts:
                _log.error("no_tokenizer", model=name, detail="served by the mesh, not among this gateway's models")
            else:
                _log.info("model_seen", model=name, context_length=known[name].context_length)
        self._reported = set(known)


def _view(model: ServedModel) -> ModelView:
    return ModelView(
        name=model.name,
        digest=model.digest,
        context_length=model.context_length,
        kv_dtype=model.kv_dtype,
        block_tokens=model.block_tokens,
        layout_version=model.layout_version,
        vocab_size=model.vocab_size,
    )


def _missing(name: str, *, is_configured: bool, is_served: bool) -> ModelNotFound | ModelUnavailable:
    """The error for a model that lacks a tokenizer here, a worker, or both."""
    if is_configured:
        return ModelUnavailable(f"no worker serves the model {name!r} at the moment", "model")
    if is_served:
        return ModelUnavailable(f"this gateway has no tokenizer for the model {name!r}", "model")
    return ModelNotFound(f"The model {name[:100]!r} does not exist", "model")
