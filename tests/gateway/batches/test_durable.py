"""Folders and records that are written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.batches import durable
from services.gateway.batches.durable import make_folder


def test_new_folders_are_private_and_on_disk_under_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[Path]()
    monkeypatch.setattr(durable, "sync_path", synced.append)
    for _ in range(2):
        make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    assert [folder.stat().st_mode & 0o777 for folder in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")
