"""From settings to an open segment log."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.common.security import MeshSecret
from services.common.settings import ConfigurationError
from services.kvstore.config import KvStoreSettings
from services.kvstore.errors import StartFailed
from services.kvstore.ssd_files import WRITE_BYTES, DirectoryInUse, SegmentDirectory
from services.kvstore.ssd_format import PAGE_BYTES
from services.kvstore.ssd_keys import KEY_FILE_BYTES, OwnerKeys
from services.kvstore.ssd_log import SegmentLog, segment_space

MIN_SEGMENTS = 4
MIN_SEGMENT_BYTES = 64 * PAGE_BYTES
_MAX_AUTO_SEGMENT_BYTES = 2**30
_MAX_SEGMENTS = 512
_log = structlog.get_logger()


def segment_bytes(settings: KvStoreSettings) -> int:
    """Size of a segment, in whole pages. Raises ConfigurationError when too few would fit."""
    space = settings.ssd_bytes - KEY_FILE_BYTES
    size = settings.ssd_segment_bytes or max(min(space // 32, _MAX_AUTO_SEGMENT_BYTES), space // _MAX_SEGMENTS)
    size = max(MIN_SEGMENT_BYTES, size // PAGE_BYTES * PAGE_BYTES)
    if segment_space(size) * MIN_SEGMENTS > space:
        raise ConfigurationError(f"kvstore: ssd_bytes={settings.ssd_bytes}: fewer than {MIN_SEGMENTS} segments")
    if space // size > _MAX_SEGMENTS:
        raise ConfigurationError(
            f"kvstore: ssd_segment_bytes={settings.ssd_segment_bytes}: more than {_MAX_SEGMENTS} segments"
        )
    return size


def open_log(
    settings: KvStoreSettings,
    secret: MeshSecret,
    *,
    refused: Callable[[str], None] = lambda _: None,
    reached: Callable[[str], None] = lambda _: None,
    chunk_bytes: int = WRITE_BYTES,
) -> SegmentLog | None:
    """The log; None where no SSD is wanted or the disk refuses it. Raises ConfigurationError or StartFailed.

    refused: told why the disk does. reached, chunk_bytes: as for SegmentLog.
    """
    if not settings.ssd_bytes:
        return None
    if settings.ssd_path is None:
        raise ConfigurationError("kvstore: ssd_path must be set where ssd_bytes is")
    size = segment_bytes(settings)
    if not settings.ssd_encrypt:
        _log.warning("blocks on the ssd are not encrypted", ssd_path=str(settings.ssd_path))
    try:
        directory = SegmentDirectory(settings.ssd_path)
        keys = OwnerKeys(settings.ssd_path / "keys", secret.storage_key)
    except DirectoryInUse:
        raise StartFailed(f"ssd_path={settings.ssd_path}: in use by another node") from None
    except OSError as error:
        _log.error("ssd tier is switched off until the next start", error=f"{settings.ssd_path}: {error.strerror}")
        refused(f"{type(error).__name__}: {error.strerror}")
        return None
    return SegmentLog(
        directory,
        keys,
        limit_bytes=settings.ssd_bytes,
        segment_bytes=size,
        encrypt=settings.ssd_encrypt,
        reached=reached,
        chunk_bytes=chunk_bytes,
    )
