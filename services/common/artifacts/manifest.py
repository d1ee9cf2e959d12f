"""What an artifact should be: sizes and digests of its files, kept beside it.

`kvmesh-manifest.json` in a model's folder, `NAME.gguf.kvmesh-manifest.json` beside a GGUF file. Format 1 has chunks of
CHUNK_BYTES and SHA-256. The artifact's digest covers names, sizes and contents of all files; the weights' digest
(weights_digest) only sizes and contents of the weight files in their order, so that renaming changes no identity.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from services.common.artifacts.chunk_reader import CHUNK_BYTES, FileDigest, FileRead, Progress, num_chunks, read_files
from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.regular_file import read_document

FORMAT = 1
MANIFEST_NAME = "kvmesh-manifest.json"
_DIGEST_HEX = 64
# Of a folder, what a model needs: weights, configuration, tokenizer, chat template.
_SUFFIXES = frozenset((".safetensors", ".json", ".txt", ".model", ".jinja"))


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's size and the SHA-256 of each of its chunks, in hex."""

    size: int
    chunks: list[str]

    @property
    def expected(self) -> list[bytes]:
        """The digests as bytes."""
        return [bytes.fromhex(chunk) for chunk in self.chunks]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of an artifact by name."""

    format: int
    chunk_bytes: int
    files: dict[str, FileEntry]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    @property
    def digest(self) -> str:
        """Hex of 16 bytes over names, sizes and contents."""
        digest = hashlib.blake2b(digest_size=16)
        for name, entry in sorted(self.files.items()):
            encoded = name.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
            digest.update(FileDigest(entry.size, tuple(entry.expected)).digest)
        return digest.hexdigest()

    def reads(self, root: Path) -> list[FileRead]:
        """Reads that verify every file below `root`, in order of name."""
        return [FileRead(root / name, entry.size, entry.expected) for name, entry in sorted(self.files.items())]


def artifact_root(path: Path) -> Path:
    """The folder in which the artifact's files are: the folder itself, or the one of a GGUF file."""
    return path if path.is_dir() else path.parent


def artifact_files(path: Path) -> list[str]:
    """Names of an artifact's files, sorted. Raises InvalidArtifact when it has none."""
    if path.is_file():
        return [path.name]
    try:
        names = sorted(
            one.name
            for one in path.iterdir()
            if one.suffix in _SUFFIXES and one.name != MANIFEST_NAME and one.is_file() and not one.name.startswith(".")
        )
    except OSError as error:
        raise InvalidArtifact(f"{path.name}: {error.strerror}") from None
    if not names:
        raise InvalidArtifact(f"{path.name}: no files of a model")
    return names


def manifest_path(path: Path) -> Path:
    """Where the manifest of the artifact at `path` is."""
    return path / MANIFEST_NAME if path.is_dir() else path.with_name(f"{path.name}.{MANIFEST_NAME}")


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of the artifact at `path`; None when it has none. Raises InvalidArtifact when it cannot be used."""
    location = manifest_path(path)
    try:
        return parse_manifest(read_document(location), location.name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidArtifact(f"{location.name}: {error.strerror}") from None


def parse_manifest(data: bytes, name: str = MANIFEST_NAME) -> Manifest:
    """A manifest from JSON; `name` is for the error. Raises InvalidArtifact."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArtifact(f"{name}: {error}") from None
    if (manifest.format, manifest.chunk_bytes) != (FORMAT, CHUNK_BYTES):
        raise InvalidArtifact(f"{name}: format {manifest.format} with chunks of {manifest.chunk_bytes} is not known")
    if not manifest.files:
        raise InvalidArtifact(f"{name}: names no files")
    for file, entry in manifest.files.items():
        _check_entry(name, file, entry)
    return manifest


def manifest_bytes(manifest: Manifest) -> bytes:
    """Its JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def write_manifest(path: Path, manifest: Manifest) -> Path:
    """Put the manifest beside the artifact at `path`, at once and durably; its path."""
    location = manifest_path(path)
    temporary = location.with_name(f".{location.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(manifest_bytes(manifest))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(location)
    return location


def manifest_of(digests: Mapping[str, FileDigest]) -> Manifest:
    """The manifest of files that have been read."""
    files = {name: FileEntry(one.size, [chunk.hex() for chunk in one.chunks]) for name, one in sorted(digests.items())}
    return Manifest(FORMAT, CHUNK_BYTES, files)


def make_manifest(path: Path, *, progress: Progress | None = None, stop: threading.Event | None = None) -> Manifest:
    """Read the artifact at `path` and say what it is. Raises InvalidArtifact."""
    names, root = artifact_files(path), artifact_root(path)
    reads = [FileRead(root / name, file_size(root / name)) for name in names]
    return manifest_of(dict(zip(names, read_files(reads, progress=progress, stop=stop), strict=True)))


def verify_artifact(
    path: Path, manifest: Manifest, *, progress: Progress | None = None, stop: threading.Event | None = None
) -> None:
    """Read the artifact at `path` and compare. Raises InvalidArtifact naming the first file and chunk that differ."""
    check_names(path, manifest)
    read_files(manifest.reads(artifact_root(path)), progress=progress, stop=stop)


def check_names(path: Path, manifest: Manifest) -> None:
    """Raise InvalidArtifact when the artifact at `path` has files that its manifest does not know."""
    unknown = sorted(set(artifact_files(path)) - manifest.files.keys())
    if unknown:
        raise InvalidArtifact(f"{unknown[0]}: not in the manifest of {path.name}")


def weights_digest(files: Iterable[FileDigest]) -> bytes:
    """16 bytes over the contents of weight files in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for one in files:
        digest.update(one.digest)
    return digest.digest()


def expected_entries(manifest: Manifest, paths: Sequence[Path]) -> list[FileEntry]:
    """The entries of some files. Raises InvalidArtifact naming one that the manifest lacks."""
    missing = next((path.name for path in paths if path.name not in manifest.files), None)
    if missing is not None:
        raise InvalidArtifact(f"{missing}: not in the manifest")
    return [manifest.files[path.name] for path in paths]


def file_size(path: Path) -> int:
    """Raises InvalidArtifact."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise InvalidArtifact(f"{path.name}: {error.strerror}") from None


def _check_entry(manifest: str, name: str, entry: FileEntry) -> None:
    if not name or Path(name).name != name or name.startswith(".") or name.endswith(MANIFEST_NAME) or "\0" in name:
        raise InvalidArtifact(f"{manifest}: {name!r} is no file name")
    if entry.size < 0 or len(entry.chunks) != num_chunks(entry.size):
        raise InvalidArtifact(f"{manifest}: {name}: {len(entry.chunks)} chunks do not make {entry.size} bytes")
    for chunk in entry.chunks:
        try:
            length = len(bytes.fromhex(chunk))
        except ValueError:
            length = 0
        if length * 2 != _DIGEST_HEX or len(chunk) != _DIGEST_HEX:
            raise InvalidArtifact(f"{manifest}: {name}: {chunk[:80]!r} is no digest")
