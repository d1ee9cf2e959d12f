"""Errors of the command line. Each is one line for the person who typed the command.

CliError
├── AlreadyRunningError   another supervisor has the state directory
├── NotRunningError       no mesh to talk to
└── StartError            a part of the mesh cannot start
"""

from __future__ import annotations


class CliError(Exception):
    """Ends a command with one line and exit status 2."""


class AlreadyRunningError(CliError):
    """Another supervisor has the state directory."""


class NotRunningError(CliError):
    """No mesh to talk to."""


class StartError(CliError):
    """A part of the mesh cannot start."""
