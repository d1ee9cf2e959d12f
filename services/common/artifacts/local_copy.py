"""One artifact from its source into the local cache: read once, digested as it is written, then an entry."""

from __future__ import annotations

import hashlib
import threading
from functools import partial
from pathlib import Path

from services.common.artifacts.cache import EntryInfo, Lease, ModelCache
from services.common.artifacts.chunk_reader import FileRead, Progress, read_files
from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.manifest import (
    Manifest,
    artifact_files,
    artifact_root,
    check_names,
    file_size,
    manifest_of,
)


def copy_from_source(
    cache: ModelCache,
    name: str,
    path: Path,
    manifest: Manifest | None,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Lease:
    """Copy the artifact at `path`; what does not match its manifest leaves nothing behind. Blocks: run in a thread.

    Raises InvalidArtifact, CacheFull or CopyFailed.
    """
    root, names = artifact_root(path), artifact_files(path)
    if manifest is not None:
        check_names(path, manifest)
        names = sorted(manifest.files)
    sizes = {one: file_size(root / one) if manifest is None else manifest.files[one].size for one in names}
    staging = cache.begin(sizes.values())
    try:
        for one, size in sizes.items():
            staging.create(one, size)
        reads = [
            FileRead(
                root / one,
                size,
                manifest.files[one].expected if manifest else None,
                then=partial(staging.write, one),
            )
            for one, size in sizes.items()
        ]
        digests = read_files(reads, progress=progress, stop=stop)
        found = manifest or manifest_of(dict(zip(names, digests, strict=True)))
        return cache.commit(staging, found, entry_info(name, path))
    finally:
        cache.discard(staging)


def entry_info(name: str, path: Path) -> EntryInfo:
    """What an entry says of the model called `name` that came from `path`."""
    return EntryInfo(name, path.name if path.is_file() else "", str(path))


def source_fingerprint(path: Path) -> str:
    """By which a source without a manifest is known again: names, sizes, times and inodes of its files.

    Raises InvalidArtifact.
    """
    digest = hashlib.blake2b(digest_size=16)
    root = artifact_root(path)
    for name in artifact_files(path):
        try:
            stat = (root / name).stat()
        except OSError as error:
            raise InvalidArtifact(f"{name}: {error.strerror}") from None
        digest.update(repr((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)).encode())
    return digest.hexdigest()
