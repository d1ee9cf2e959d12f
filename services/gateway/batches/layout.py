"""Where files and batches lie below the directory that gateways share, and what they are called. Pure.

ROOT/open/BATCH                        holds the tenant's name while the batch is not over
ROOT/tenants/t.TENANT/files/FILE       bytes of a file; FILE.json says that it is complete, and what it is
ROOT/tenants/t.TENANT/batches/BATCH/   everything of one batch, see batch_store
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

_ID_BYTES = 12
_FILE_ID = re.compile(r"file-[0-9a-f]{24}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")


def new_file_id() -> str:
    """One that nobody has."""
    return f"file-{secrets.token_hex(_ID_BYTES)}"


def new_batch_id() -> str:
    """One that nobody has."""
    return f"batch_{secrets.token_hex(_ID_BYTES)}"


def output_file_id(batch_id: str, generation: int, kind: str) -> str:
    """The file that a generation of runs of a batch makes. kind: output or error."""
    return f"file-{_derived(f'{batch_id}/{generation}/{kind}')}"


def line_id(batch_id: str, number: int) -> str:
    """The id of a line in the files of results."""
    return f"batch_req_{_derived(f'{batch_id}/line/{number}')}"


def is_file_id(text: str) -> bool:
    """Whether it can be one; anything else must not become a path."""
    return _FILE_ID.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    """The same for batches."""
    return _BATCH_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below one root. A tenant's name has letters, digits, dots, - and _ only."""

    root: Path

    @property
    def open(self) -> Path:
        """Folder of the batches that are not over."""
        return self.root / "open"

    @property
    def tenants(self) -> Path:
        """Folder of all tenants."""
        return self.root / "tenants"

    def tenant(self, name: str) -> Path:
        """Everything of one tenant."""
        # The prefix makes `.` and `..` names like any other.
        return self.tenants / f"t.{name}"

    def files(self, tenant: str) -> Path:
        """The tenant's files."""
        return self.tenant(tenant) / "files"

    def batches(self, tenant: str) -> Path:
        """The tenant's batches."""
        return self.tenant(tenant) / "batches"

    def batch(self, tenant: str, batch_id: str) -> Path:
        """One batch."""
        return self.batches(tenant) / batch_id


def tenant_of(folder: Path) -> str:
    """Inverse of `Layout.tenant`."""
    return folder.name.removeprefix("t.")


def _derived(text: str) -> str:
    return blake2b(text.encode(), digest_size=_ID_BYTES).hexdigest()
