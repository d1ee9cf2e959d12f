"""Digest of the tokenizer that a model artifact carries, by which gateway and worker see that theirs is the same."""

from __future__ import annotations

from hashlib import blake2b

from services.common.blocks import tagged
from services.common.gguf_metadata import read_raw_metadata
from services.common.models import ModelSource

_TAG_FILE, _TAG_CONTENT = 64, 65
_FOLDER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_DIGEST_BYTES = 16


def tokenizer_digest(source: ModelSource) -> bytes:
    """16 bytes over the raw tokenizer: GGUF metadata under `tokenizer.`, or the folder's tokenizer files."""
    if source.is_gguf:
        named = read_raw_metadata(source.path, ("tokenizer.",))
    else:
        paths = {name: source.path / name for name in _FOLDER_FILES}
        named = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    parts = [part for name in sorted(named) for part in ((_TAG_FILE, name.encode()), (_TAG_CONTENT, named[name]))]
    return blake2b(tagged(parts), digest_size=_DIGEST_BYTES).digest()
