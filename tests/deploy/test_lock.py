"""requirements.lock holds what its packages need on every supported Python: it is installed without resolving."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).parents[2] / "requirements.lock"


def locked() -> set[str]:
    lines = LOCK.read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if line and not line.startswith("#")}


def needed_by(name: str, python: str) -> Iterator[str]:
    """Packages that `name` needs there, without extras; none when it is not installed here."""
    environment = {
        **default_environment(),
        "extra": "",
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
    }
    try:
        requirements = [Requirement(line) for line in requires(name) or ()]
    except PackageNotFoundError:
        return
    for one in requirements:
        if one.marker is None or one.marker.evaluate(environment):
            yield canonicalize_name(one.name)


def closure(name: str, python: str) -> set[str]:
    """`name` and all that it needs: torch is installed with its own dependencies."""
    found, open_names = {name}, [name]
    while open_names:
        fresh = set(needed_by(open_names.pop(), python)) - found
        found |= fresh
        open_names += fresh
    return found


# 3.11.2 is Debian 12's.
@pytest.mark.parametrize("python", ["3.11.2", "3.11.9", "3.12.8"])
def test_every_dependency_of_a_locked_package_is_locked(python: str) -> None:
    provided = locked() | closure("torch", python)
    missing = {(name, other) for name in locked() for other in needed_by(name, python) if other not in provided}
    assert not missing
