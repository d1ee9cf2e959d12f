"""Files that a Hugging Face download names by their own SHA-256, checked against that name.

There a model's folder holds links into `blobs/`, where a large file is called by the SHA-256 of its contents.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from services.common.artifacts.errors import InvalidArtifact

_SHA256 = re.compile(r"[0-9a-f]{64}")


def verify_blob_names(files: list[Path]) -> int:
    """Check every file that is called by its digest; how many there were. Raises InvalidArtifact naming one."""
    blobs = [(file, file.resolve()) for file in files]
    named = [(file, blob) for file, blob in blobs if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name)]
    for file, blob in named:
        with blob.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != blob.name:
                raise InvalidArtifact(f"{file.name}: its contents do not have the SHA-256 that its blob is called by")
    return len(named)
