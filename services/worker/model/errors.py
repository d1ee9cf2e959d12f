"""Errors of loading a model.

ModelError
├── UnsupportedModel   the model needs something that is not implemented; the message names it
└── InvalidWeights     a tensor is missing, has another shape, or a file is not what it claims to be
"""

from __future__ import annotations

_LONGEST = 500


class ModelError(Exception):
    """A model cannot be loaded; the message is one line for the operator, whatever a file's names and values hold."""

    def __init__(self, message: str) -> None:
        line = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in message)
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...")


class UnsupportedModel(ModelError):
    """The model asks for an architecture or a feature that is not implemented."""


class InvalidWeights(ModelError):
    """The weights do not fit the configuration."""
