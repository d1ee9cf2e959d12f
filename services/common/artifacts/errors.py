"""Errors of model artifacts; every message is one line that names the file.

ArtifactError
├── InvalidArtifact    a file is missing, cut short, or not what its manifest says
├── CacheFull          the local cache has no room, and nothing in it may go
├── CopyTimeout        another process copied the same artifact for too long
└── CopyFailed         a copy from a peer or from the source broke off
"""

from __future__ import annotations


class ArtifactError(Exception):
    """Base of all errors of artifacts."""


class InvalidArtifact(ArtifactError):
    """The files are not the artifact that they should be; never used."""


class CacheFull(ArtifactError):
    """The bound of the cache leaves no room for an artifact."""


class CopyTimeout(ArtifactError):
    """Somebody else's copy did not end in time."""


class CopyFailed(ArtifactError):
    """The bytes could not be fetched."""
