"""The release before this one, out of the repository's history, and which processes of a mesh run which of the two."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Release N where this tree is N+1: raise it with each release, to the commit of the last one.
OLD_COMMIT = "e1decacfd82e1d70e935921bbcbf73e648041d0c"
HOOK = Path(__file__).with_name("hook")


def old_tree(folder: Path) -> Path:
    """The old release as files. Skips the test where the clone does not reach back to it."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", OLD_COMMIT], capture_output=True, check=False, timeout=60
    )
    if archive.returncode:
        pytest.skip(f"the old release is not in this clone: {archive.stderr.decode(errors='replace').strip()[:200]}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True, timeout=60)
    # Their names tell from which sources they were built: what fits neither is built anew.
    for library in (ROOT / "kernels" / "cpu").glob("*.so"):
        shutil.copy(library, folder / "kernels" / "cpu")
    return folder


class Releases:
    """Owner of the file in which each process looks up its release as it starts."""

    def __init__(self, folder: Path, old: Path) -> None:
        """All run this release until `to_old` says otherwise."""
        self._file = folder / "releases.json"
        self._trees = {True: str(old), False: str(ROOT)}
        self._is_old: dict[str, bool] = {"*": False}
        self._write()

    @property
    def env(self) -> dict[str, str]:
        """What the processes need in their environment. Not the current directory, which would go before."""
        return {"PYTHONPATH": str(HOOK), "PYTHONSAFEPATH": "1", "RELEASES_OF_PROCESSES": str(self._file)}

    def to_old(self, names: Iterable[str]) -> None:
        """These processes run the old release from their next start on; "": the supervisor and the command line."""
        self._is_old = {"": False, "*": False} | dict.fromkeys(names, True)
        self._write()

    def _write(self) -> None:
        trees = {name: self._trees[is_old] for name, is_old in self._is_old.items()}
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps(trees))
        temporary.replace(self._file)
