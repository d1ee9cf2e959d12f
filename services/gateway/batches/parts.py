"""What a gateway has that serves files and batches, built from its settings."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.redis_client import RedisClient
from services.common.settings import ConfigurationError
from services.gateway.batches.batch_store import BatchStore
from services.gateway.batches.disk import Disk
from services.gateway.batches.file_store import FileLimits, FileStore
from services.gateway.batches.layout import Layout
from services.gateway.batches.runner import BatchRunner, RunnerLimits
from services.gateway.config import GatewaySettings
from services.gateway.core import Core


@dataclass(frozen=True, slots=True)
class Batches:
    """The parts."""

    store: BatchStore
    disk: Disk
    runner: BatchRunner

    async def close(self) -> None:
        """Leave all batches, and end the threads."""
        await self.runner.stop()
        self.disk.close()


def build_batches(settings: GatewaySettings, core: Core, client: RedisClient, instance: str) -> Batches | None:
    """None where no directory is set. Call inside the running loop. Raises ConfigurationError."""
    if settings.files_dir is None:
        return None
    files = FileStore(
        Layout(settings.files_dir),
        FileLimits(
            max_bytes=settings.max_file_bytes,
            max_tenant_bytes=settings.max_tenant_file_bytes,
            max_tenant_files=settings.max_tenant_files,
            life_s=settings.file_life_s,
        ),
    )
    store = BatchStore(files, max_open=settings.max_tenant_batches)
    try:
        store.prepare()
    except OSError as error:
        raise ConfigurationError(f"gateway: files_dir={settings.files_dir}: {error.strerror}") from None
    disk = Disk()
    limits = RunnerLimits(
        max_running=settings.max_running_batches,
        max_lines=settings.max_batch_lines,
        max_requests=settings.max_batch_requests,
    )
    return Batches(store, disk, BatchRunner(core, store, disk, client, instance, limits))
