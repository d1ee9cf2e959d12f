"""`kvmesh models`: model artifacts on this machine: seal them, verify them, keep them in the local cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from services.cli.commands.ctl import JsonOption, show_rows
from services.cli.errors import CliError
from services.common.artifacts.blob_names import verify_blob_names
from services.common.artifacts.cache import CacheEntry, ModelCache
from services.common.artifacts.chunk_reader import Progress as Told
from services.common.artifacts.errors import ArtifactError
from services.common.artifacts.local_copy import copy_from_source
from services.common.artifacts.manifest import (
    artifact_files,
    artifact_root,
    file_size,
    make_manifest,
    read_manifest,
    verify_artifact,
    write_manifest,
)
from services.common.artifacts.safetensors_header import read_safetensors_header
from services.common.artifacts.settings import configured_cache
from services.common.gguf_metadata import read_metadata
from services.common.models import DEFAULT_MODEL, ModelSource, resolve_model
from services.common.settings import ConfigurationError

DirOption = Annotated[
    Path | None, typer.Option("--cache-dir", help="Local model cache; default: the workers' model_cache_dir.")
]
ModelArgument = Annotated[str, typer.Argument(help="A known name, PATH or NAME=PATH of a GGUF file or a folder.")]
EntryArgument = Annotated[str, typer.Argument(help="Name or digest (its beginning will do) of an entry of the cache.")]

models = typer.Typer(no_args_is_help=True, help="Model artifacts on this machine: seal, verify, cache.")


@models.command("list")
def list_models(cache_dir: DirOption = None, as_json: JsonOption = False) -> None:
    """Known models, and what the local cache holds: sizes, digests, and whether it is in use."""
    with _one_line_errors():
        rows = [_source_row(resolve_model(DEFAULT_MODEL))]
        cache = _cache_or_none(cache_dir)
        rows += [_entry_row(entry) for entry in cache.entries()] if cache else []
    show_rows(rows, as_json)


@models.command()
def seal(model: ModelArgument) -> None:
    """Write a manifest of sizes and digests beside a model: from then on a file that differs is refused."""
    with _one_line_errors(), _progress("reading") as told:
        source = resolve_model(model)
        manifest = make_manifest(source.path, progress=told)
        root = artifact_root(source.path)
        blobs = verify_blob_names([root / name for name in manifest.files])
        location = write_manifest(source.path, manifest)
    typer.echo(f"{location}: {len(manifest.files)} files, {manifest.size} bytes, digest {manifest.digest}")
    if blobs:
        typer.echo(f"{blobs} files have the SHA-256 that their download is called by")


@models.command()
def verify(
    model: Annotated[str, typer.Argument(help="A model, or an entry of the cache; default: all entries.")] = "",
    cache_dir: DirOption = None,
) -> None:
    """Read a model, or everything in the cache, and compare with its manifest; exit status 1 where one differs."""
    with _one_line_errors():
        sources = _to_verify(model, cache_dir)
    failures = 0
    for source in sources:
        try:
            with _progress(source.name) as told:
                typer.echo(f"{source.name}: {_verified(source, told)}")
        except (ArtifactError, ConfigurationError) as error:
            typer.echo(f"{source.name}: {error}", err=True)
            failures += 1
    if failures:
        raise typer.Exit(1)


@models.command()
def add(model: ModelArgument, cache_dir: DirOption = None) -> None:
    """Copy a model into the local cache, where workers of this machine find it; verified where it is sealed."""
    with _one_line_errors(), _progress("copying") as told:
        source, cache = resolve_model(model), _cache(cache_dir)
        manifest = read_manifest(source.path)
        present = cache.lease(manifest.digest) if manifest else None
        lease = present or copy_from_source(cache, source.name, source.path, manifest, progress=told)
        lease.close()
    typer.echo(f"{source.name}: {'already there' if present else 'added'}, digest {lease.digest}")


@models.command()
def remove(entry: EntryArgument, cache_dir: DirOption = None) -> None:
    """Remove an entry from the cache. One that a process uses stays, with exit status 1."""
    with _one_line_errors():
        cache = _cache(cache_dir)
        found = _find(cache, entry)
        if found is None:
            raise CliError(f"the cache has no {entry!r}")
        if not cache.remove(found.digest):
            typer.echo(f"{found.info.name}: in use", err=True)
            raise typer.Exit(1)
    typer.echo(f"{found.info.name}: removed")


@models.command()
def evict(
    to_bytes: Annotated[int, typer.Option(min=0, help="Most bytes that may stay.")] = 0, cache_dir: DirOption = None
) -> None:
    """Remove the least recently used entries until at most so many bytes are left; those in use stay."""
    with _one_line_errors():
        cache = _cache(cache_dir)
        gone = cache.evict(to_bytes)
        left = cache.used_bytes()
    typer.echo(f"{len(gone)} removed, {left} bytes left")


def _cache(given: Path | None) -> ModelCache:
    cache = _cache_or_none(given)
    if cache is None:
        raise CliError("no local model cache: --cache-dir, KVMESH_MODEL_CACHE_DIR or model_cache_dir names one")
    return cache


def _cache_or_none(given: Path | None) -> ModelCache | None:
    folder, max_bytes = configured_cache()
    folder = given or folder
    return None if folder is None else ModelCache(folder.expanduser().absolute(), max_bytes)


def _find(cache: ModelCache, wanted: str) -> CacheEntry | None:
    """By name (the last used of several), else by the beginning of its digest. Raises CliError when that is unclear."""
    entries = cache.entries()
    named = [entry for entry in entries if entry.info.name == wanted]
    if named:
        return named[-1]
    begun = [entry for entry in entries if entry.digest.startswith(wanted)]
    if len(begun) > 1:
        raise CliError(f"{len(begun)} entries begin with {wanted!r}")
    return begun[0] if begun else None


def _to_verify(model: str, cache_dir: Path | None) -> list[ModelSource]:
    cache = _cache_or_none(cache_dir) if model else _cache(cache_dir)
    if cache and not model:
        return [ModelSource(entry.info.name, entry.path) for entry in cache.entries()]
    entry = _find(cache, model) if cache else None
    return [ModelSource(entry.info.name, entry.path) if entry else resolve_model(model)]


def _verified(source: ModelSource, told: Told) -> str:
    """What is said of an artifact that is well. Raises ArtifactError or ConfigurationError."""
    manifest = read_manifest(source.path)
    if manifest is not None:
        verify_artifact(source.path, manifest, progress=told)
        return f"good, {len(manifest.files)} files, {manifest.size} bytes, digest {manifest.digest}"
    if source.is_gguf:
        read_metadata(source.path, ())
    for name in artifact_files(source.path):
        if name.endswith(".safetensors"):
            read_safetensors_header(source.path / name)
    what = "its metadata is" if source.is_gguf else "its headers are"
    return f"not sealed: {what} well, its contents cannot be verified (`kvmesh models seal`)"


def _source_row(source: ModelSource) -> dict[str, object]:
    manifest, root = read_manifest(source.path), artifact_root(source.path)
    size = sum(file_size(root / name) for name in artifact_files(source.path))
    digest = manifest.digest if manifest else "not sealed"
    return {"model": source.name, "where": "known", "bytes": size, "digest": digest, "path": str(source.path)}


def _entry_row(entry: CacheEntry) -> dict[str, object]:
    return {
        "model": entry.info.name,
        "where": "cache",
        "bytes": entry.size,
        "digest": entry.digest,
        "path": str(entry.path),
        "source": entry.info.source,
        "in_use": entry.in_use,
        "last_used": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(entry.last_used_s)),
    }


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except ArtifactError as error:
        raise CliError(str(error)) from None


@contextmanager
def _progress(what: str) -> Iterator[Told]:
    """A line with bytes and rate on a terminal's standard error; nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda count: bar.advance(task, count)
