"""The local cache: bounded, never evicting what is used, never showing what is not whole, whoever dies when."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.artifacts.cache import EntryInfo, Lease, ModelCache
from services.common.artifacts.chunk_reader import CHUNK_BYTES, FileDigest, chunk_digest
from services.common.artifacts.errors import ArtifactError, CacheFull, CopyFailed, CopyTimeout, InvalidArtifact
from services.common.artifacts.file_lock import lock, try_lock
from services.common.artifacts.local_copy import copy_from_source, source_fingerprint
from services.common.artifacts.manifest import (
    Manifest,
    make_manifest,
    manifest_of,
    read_manifest,
    verify_artifact,
    write_manifest,
)
from services.common.artifacts.staging import Staging

MIB = 2**20
OVERHEAD = 16_384


def source(folder: Path, name: str, size: int, seed: int = 0) -> Path:
    """A sealed artifact of two files."""
    path = folder / name
    path.mkdir(parents=True)
    data = random.Random(seed).randbytes(size)
    (path / "model.safetensors").write_bytes(data)
    (path / "config.json").write_text(json.dumps({"name": name}))
    write_manifest(path, make_manifest(path))
    return path


def copied(cache: ModelCache, path: Path) -> Lease:
    return copy_from_source(cache, path.name, path, read_manifest(path))


def last_used(cache: ModelCache, digests: list[str]) -> None:
    """As if these were used long ago, one second after the other."""
    for second, digest in enumerate(digests):
        os.utime(cache.folder / "leases" / digest, (second, second))


def check_whole(cache: ModelCache) -> None:
    """Everything that the cache shows is what its manifest says."""
    for entry in cache.entries():
        manifest = read_manifest(entry.path)
        assert manifest is not None
        assert manifest.digest == entry.digest
        verify_artifact(entry.path, manifest)


def test_a_copy_becomes_an_entry(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache", 10 * MIB)
    path = source(tmp_path, "m", 3 * MIB)
    manifest = make_manifest(path)
    assert cache.lease(manifest.digest) is None
    lease = copied(cache, path)
    assert lease.digest == manifest.digest
    assert lease.path.parent == tmp_path / "cache" / "entries"
    check_whole(cache)
    (entry,) = cache.entries()
    assert (entry.info.name, entry.info.source, entry.in_use, entry.path) == ("m", str(path), True, lease.path)
    assert 3 * MIB < entry.size < 3 * MIB + OVERHEAD
    assert cache.used_bytes() == entry.size
    again = cache.lease(manifest.digest)
    assert again is not None
    lease.close()
    assert not cache.remove(manifest.digest), "the second lease holds it"
    again.close()
    again.close()
    assert cache.remove(manifest.digest)
    assert cache.entries() == []
    assert not cache.remove(manifest.digest)
    assert list((tmp_path / "cache" / "staging").iterdir()) == []


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(os.urandom(1000))
    cache = ModelCache(tmp_path / "cache", MIB)
    lease = copy_from_source(cache, "m", path, None)
    assert lease.path.name == "m.gguf"
    assert lease.path.read_bytes() == path.read_bytes()
    check_whole(cache)


def test_least_recently_used_goes_first_and_never_what_is_used(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache", 3 * MIB + 4 * OVERHEAD)
    sources = [source(tmp_path, str(number), MIB, number) for number in range(5)]
    digests = [make_manifest(path).digest for path in sources]
    leases = [copied(cache, path) for path in sources[:3]]
    with pytest.raises(CacheFull, match="do not fit"):
        copied(cache, sources[3])
    assert len(cache.entries()) == 3
    for lease in leases:
        lease.close()
    last_used(cache, digests[:3])
    kept = cache.lease(digests[0])
    assert kept is not None
    copied(cache, sources[3]).close()
    assert {entry.digest for entry in cache.entries()} == {digests[0], digests[2], digests[3]}
    kept.close()
    last_used(cache, [digests[2], digests[0], digests[3]])
    copied(cache, sources[4]).close()
    assert {entry.digest for entry in cache.entries()} == {digests[0], digests[3], digests[4]}
    assert cache.evict(2 * MIB) == [digests[0], digests[3]]
    assert cache.used_bytes() <= 2 * MIB


def test_an_artifact_larger_than_the_cache_evicts_nothing(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache", MIB)
    copied(cache, source(tmp_path, "small", 1000)).close()
    with pytest.raises(CacheFull):
        copied(cache, source(tmp_path, "large", 2 * MIB))
    assert [entry.info.name for entry in cache.entries()] == ["small"]


def test_a_source_that_differs_leaves_nothing(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache", 64 * MIB)
    path = source(tmp_path, "m", CHUNK_BYTES + 5)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[CHUNK_BYTES + 1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(InvalidArtifact, match=r"model\.safetensors: chunk 1 "):
        copied(cache, path)
    assert (cache.entries(), cache.used_bytes()) == ([], 0)
    assert list((tmp_path / "cache" / "staging").iterdir()) == []


def test_a_disk_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ModelCache(tmp_path / "cache", 64 * MIB)
    path = source(tmp_path, "m", 1000)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    for call in ("posix_fallocate", "pwrite", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises((CopyFailed, OSError), match="No space left"):
                copied(cache, path)
        assert (cache.entries(), cache.used_bytes()) == ([], 0)
    with pytest.raises(ArtifactError, match="model cache"):
        ModelCache(path / "config.json" / "cache", MIB)


def test_giving_up_stops_a_copy(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache", 64 * MIB)
    stop = threading.Event()
    stop.set()
    with pytest.raises(InvalidArtifact, match="given up"):
        copy_from_source(cache, "m", source(tmp_path, "m", 1000), None, stop=stop)
    assert cache.used_bytes() == 0


def test_fingerprints_and_what_is_known(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache", MIB)
    path = source(tmp_path, "m", 1000)
    before = source_fingerprint(path)
    assert source_fingerprint(path) == before
    assert cache.known_digest(before) == ""
    cache.remember(before, "abc")
    assert ModelCache(tmp_path / "cache", MIB).known_digest(before) == "abc"
    (path / "config.json").write_text("{}")
    assert source_fingerprint(path) != before


def test_locks(tmp_path: Path) -> None:
    held = try_lock(tmp_path / "l")
    assert held is not None
    assert try_lock(tmp_path / "l") is None
    started_s = time.monotonic()
    with pytest.raises(CopyTimeout, match=r"locked by another process for 0\.1 s"):
        lock(tmp_path / "l", 0.1)
    assert time.monotonic() - started_s < 30
    held.close()
    with lock(tmp_path / "l", 0.1):
        pass


_COPY = """
import sys
from pathlib import Path
from services.common.artifacts.cache import ModelCache
from services.common.artifacts.local_copy import copy_from_source
from services.common.artifacts.manifest import read_manifest
cache = ModelCache(Path(sys.argv[1]), 10 ** 9)
path = Path(sys.argv[2])
print("copying", flush=True)
lease = copy_from_source(cache, "m", path, read_manifest(path))
print("done", flush=True)
sys.stdin.read()
"""


def test_a_killed_copy_never_shows_and_is_cleaned_up(tmp_path: Path) -> None:
    """SIGKILL at moments spread over the copy: before, in mid write, at the rename, after it."""
    path = source(tmp_path, "m", 48 * MIB)
    folder = tmp_path / "cache"
    shown = 0
    for number in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", _COPY, str(folder), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "copying\n"
            if number == 7:
                assert process.stdout.readline() == "done\n"
            else:
                time.sleep(0.015 * number)
            process.send_signal(signal.SIGKILL)
        cache = ModelCache(folder, 10**9)
        assert list((folder / "staging").iterdir()) == []
        check_whole(cache)
        entries = cache.entries()
        shown += len(entries)
        assert cache.used_bytes() == sum(entry.size for entry in entries)
        for entry in entries:
            assert not entry.in_use, "its process is dead"
            assert cache.remove(entry.digest)
    assert shown >= 1


def test_another_process_holds_its_lease_while_it_lives(tmp_path: Path) -> None:
    path, folder = source(tmp_path, "m", MIB), tmp_path / "cache"
    process = subprocess.Popen(
        [sys.executable, "-c", _COPY, str(folder), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["copying\n", "done\n"]
        cache = ModelCache(folder, 10**9)
        (entry,) = cache.entries()
        assert entry.in_use
        assert not cache.remove(entry.digest)
        assert cache.evict(0) == []
        process.kill()
    assert cache.evict(0) == [entry.digest]


class Walk:
    """A cache and a model of what must be in it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.cache = ModelCache(folder, max_bytes)
        self.leases: list[Lease] = []
        self.stagings: list[tuple[Staging, Manifest, bytes]] = []

    def begin(self, number: int, size: int) -> None:
        data = bytes([number]) * size
        manifest = manifest_of({"f.gguf": FileDigest(size, (chunk_digest([memoryview(data)]),))})
        try:
            staging = self.cache.begin([size])
        except CacheFull:
            return
        staging.create("f.gguf", size)
        self.stagings.append((staging, manifest, data))

    def commit(self) -> None:
        staging, manifest, data = self.stagings.pop()
        staging.write("f.gguf", 0, [memoryview(data)])
        self.leases.append(self.cache.commit(staging, manifest, EntryInfo("m", "f.gguf", "")))

    def act(self, action: str, number: int, size: int) -> None:
        if action == "begin":
            self.begin(number, size)
        elif action == "commit" and self.stagings:
            self.commit()
        elif action == "discard" and self.stagings:
            self.cache.discard(self.stagings.pop(0)[0])
        elif action == "crash" and self.stagings:
            # As a process that dies: descriptors are closed, files stay.
            self.stagings.pop(0)[0].close()
        elif action == "restart":
            self.cache = ModelCache(self.folder, self.max_bytes)
        elif action == "lease":
            for entry in self.cache.entries()[:1]:
                lease = self.cache.lease(entry.digest)
                assert lease is not None
                self.leases.append(lease)
        elif action == "release" and self.leases:
            self.leases.pop(0).close()
        elif action == "evict":
            self.cache.evict(size)

    def check(self) -> None:
        entries = {entry.digest: entry for entry in self.cache.entries()}
        assert self.cache.used_bytes() <= self.max_bytes
        files = sum(one.stat().st_size for one in (self.folder / "entries").rglob("*") if one.is_file())
        assert sum(entry.size for entry in entries.values()) == files
        held = {lease.digest for lease in self.leases}
        assert held <= entries.keys(), "nothing that is used may go"
        assert {digest for digest, entry in entries.items() if entry.in_use} == held
        for staging, _, _ in self.stagings:
            assert staging.folder.is_dir(), "a living copy is nobody's left-over"


ACTIONS = ("begin", "begin", "commit", "commit", "discard", "crash", "restart", "lease", "release", "evict")


@settings(max_examples=40)
@given(
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.integers(0, 60_000)), max_size=25),
    max_bytes=st.integers(30_000, 200_000),
)
def test_accounting(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], max_bytes: int
) -> None:
    walk = Walk(tmp_path_factory.mktemp("walk") / "cache", max_bytes)
    for action, number, size in steps:
        walk.act(action, number, size)
        walk.check()
    for staging, _, _ in walk.stagings:
        staging.close()
    for lease in walk.leases:
        lease.close()
    check_whole(walk.cache)


@pytest.mark.parametrize("part", ["lock", "staging"])
def test_a_directory_that_is_no_cache_is_refused(tmp_path: Path, part: str) -> None:
    """Also where only a later step finds out, as with a disk that can only be read."""
    ModelCache(tmp_path / "cache", MIB)
    path = tmp_path / "cache" / part
    if path.is_dir():
        path.rmdir()
        path.touch()
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(ArtifactError, match="model cache"):
        ModelCache(tmp_path / "cache", MIB)
