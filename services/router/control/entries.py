"""What operators can set, as plain data: versions of public names with their traffic, aliases, drained workers. Pure.

An entry lives in Redis under its key, as JSON. Functions return changed copies and raise OperatorError with one line
for the operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from services.common.adapter_files import LARGEST_RANK
from services.router.errors import FailedPreconditionError, InvalidOperationError, LabelTakenError

MAX_VERSIONS = 64
MAX_WEIGHT = 1_000_000
ALL = 100
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_LEAST_PREFIX = 8
_LABEL_DIGITS = 12
_MAX_NAME = 256
_MAX_PATH = 1024
MAX_ADAPTERS = 4096
_MODEL, _WORKER, _ADAPTER, _ALIAS = "model/", "worker/", "adapter/", "alias/"
# Between a base model's name and an adapter's; no adapter's name has it.
ADAPTER_SEPARATOR = ":"


class ModelEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Versions of one public name: digests (hex) by label, and weights by digest.

    Without weights every digest gets traffic. rollback_to: the digest that had all traffic before the present rollout.
    """

    versions: dict[str, str] = {}
    weights: dict[str, int] = {}
    rollback_to: str = ""

    def label_of(self, digest: str) -> str:
        """Its label; empty when it is not registered."""
        return next((label for label, one in self.versions.items() if one == digest), "")


class DrainEntry(msgspec.Struct, frozen=True):
    """The start of a worker that gets no new requests; 0: drained no more."""

    epoch: int


class AdapterEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A low-rank adapter of a base model. digest: hex; empty: it is registered no more. path: its folder at workers."""

    digest: str = ""
    rank: int = 0
    path: str = ""
    created_s: int = 0


def adapter_key(model: str, name: str) -> str:
    """Key of an adapter's entry."""
    return f"{_ADAPTER}{model}{ADAPTER_SEPARATOR}{name}"


def adapter_of(key: str) -> tuple[str, str] | None:
    """Base model and name of an adapter's key; None for other keys."""
    if not key.startswith(_ADAPTER):
        return None
    model, _, name = key.removeprefix(_ADAPTER).rpartition(ADAPTER_SEPARATOR)
    return model, name


def check_adapter(name: str, entry: AdapterEntry) -> None:
    """Raise InvalidOperationError for what no client could ask for or no worker load."""
    if not _LABEL.fullmatch(name):
        raise InvalidOperationError(f"adapter {name[:80]!r}: not 1 to 64 letters, digits or any of . _ -")
    if not is_digest(entry.digest):
        raise InvalidOperationError("an adapter's digest has 32 digits in hex")
    if not 1 <= entry.rank <= LARGEST_RANK:
        raise InvalidOperationError(f"rank {entry.rank}: must be 1 to {LARGEST_RANK}")
    if not entry.path.startswith("/") or len(entry.path) > _MAX_PATH or not entry.path.isprintable():
        raise InvalidOperationError(f"the folder must be an absolute path of at most {_MAX_PATH} printable characters")


class AliasEntry(msgspec.Struct, frozen=True):
    """The model that another name stands for; empty: none any more."""

    model: str


def alias_key(alias: str) -> str:
    """Key of an alias; the empty one is the default model's."""
    return _ALIAS + alias


def alias_of(key: str) -> str | None:
    """Alias of its key; None for other keys."""
    return key.removeprefix(_ALIAS) if key.startswith(_ALIAS) else None


def model_key(name: str) -> str:
    """Key of a public name's entry."""
    return _MODEL + name


def drain_key(worker_id: str) -> str:
    """Key of a worker's entry."""
    return _WORKER + worker_id


def name_of(key: str) -> str | None:
    """Public name of a model's key; None for other keys."""
    return key.removeprefix(_MODEL) if key.startswith(_MODEL) else None


def worker_of(key: str) -> str | None:
    """Worker of a drain's key; None for other keys."""
    return key.removeprefix(_WORKER) if key.startswith(_WORKER) else None


def register(entry: ModelEntry, digest: str, label: str) -> ModelEntry:
    """The digest has this label from now on; an empty one stands for its first digits."""
    label = label or digest[:_LABEL_DIGITS]
    if not _LABEL.fullmatch(label):
        raise InvalidOperationError(f"version {label[:80]!r}: not 1 to 64 letters, digits or any of . _ -")
    if entry.versions.get(label, digest) != digest:
        raise LabelTakenError(f"version {label} is already the digest {entry.versions[label]}")
    versions = {**{known: one for known, one in entry.versions.items() if one != digest}, label: digest}
    if len(versions) > MAX_VERSIONS:
        raise FailedPreconditionError(f"{MAX_VERSIONS} versions are registered: unregister one")
    return msgspec.structs.replace(entry, versions=versions)


def unregister(entry: ModelEntry, version: str) -> ModelEntry:
    """Without a version that has no traffic."""
    digest = resolve(entry, version)
    if entry.weights.get(digest):
        raise FailedPreconditionError(f"version {version} has traffic: shift it first")
    return ModelEntry(
        versions={label: one for label, one in entry.versions.items() if one != digest},
        weights={one: weight for one, weight in entry.weights.items() if one != digest},
        rollback_to="" if entry.rollback_to == digest else entry.rollback_to,
    )


def set_traffic(entry: ModelEntry, weights: Mapping[str, int]) -> ModelEntry:
    """With these weights, by label or digest; none at all: without weights."""
    if not weights:
        return msgspec.structs.replace(entry, weights={}, rollback_to="")
    if any(weight > MAX_WEIGHT for weight in weights.values()):
        raise InvalidOperationError(f"a weight is at most {MAX_WEIGHT}")
    shares = {resolve(entry, version): weight for version, weight in weights.items()}
    if len(shares) < len(weights):
        raise InvalidOperationError("a version is named twice")
    if not any(shares.values()):
        raise InvalidOperationError("all weights are 0: nobody would be served")
    shares = {digest: weight for digest, weight in shares.items() if weight}
    return msgspec.structs.replace(entry, weights=shares, rollback_to=_rollback_to(entry, shares))


def rollback(entry: ModelEntry) -> ModelEntry:
    """All traffic to the version that had it before the rollout."""
    if not entry.rollback_to:
        raise FailedPreconditionError("there is no rollout to roll back: no version had all the traffic before")
    return msgspec.structs.replace(entry, weights={entry.rollback_to: ALL}, rollback_to="")


def resolve(entry: ModelEntry, version: str) -> str:
    """The registered digest that a label, a digest or at least its first 8 digits mean."""
    if version in entry.versions:
        return entry.versions[version]
    return full_digest(version, entry.versions.values(), "registered: `kvmesh ctl register` does it")


def full_digest(given: str, known: Iterable[str], what: str) -> str:
    """The one digest of `known` that `given` is or begins. what: what those known are, for the error."""
    digests = {one for one in known if one.startswith(given.lower())}
    if len(given) < _LEAST_PREFIX or not digests:
        raise InvalidOperationError(f"version {given[:80]!r} is not {what}")
    if len(digests) > 1:
        raise InvalidOperationError(f"{given} begins {len(digests)} digests: give more of it")
    return digests.pop()


def is_digest(text: str) -> bool:
    """Whether it is a whole digest in hex."""
    return _DIGEST.fullmatch(text) is not None


def check_name(name: str) -> None:
    """Raise InvalidOperationError for what is no public name."""
    if not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        raise InvalidOperationError(f"a public name has 1 to {_MAX_NAME} printable characters")


def _rollback_to(entry: ModelEntry, shares: Mapping[str, int]) -> str:
    """A rollout begins when a version that had all traffic shares or loses it, and goes on until traffic is back."""
    if len(entry.weights) == 1:
        (settled,) = entry.weights
        target = entry.rollback_to if settled in shares and len(shares) == 1 else settled
    elif entry.weights:
        target = entry.rollback_to
    else:
        # Nobody has said which version was the good one: the one that keeps most of the traffic is taken for it.
        target = max(shares, key=lambda digest: shares[digest]) if len(shares) > 1 else ""
    return "" if set(shares) == {target} else target
