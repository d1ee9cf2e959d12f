"""What can go wrong in the router.

RouterError
├── BadAskError: the gateway's message makes no sense; it alone is refused
└── WrongWorkerError: who answers at a worker's address is not the worker that registered it
"""

from __future__ import annotations


class RouterError(Exception):
    """Base of the router's errors."""


class BadAskError(RouterError):
    """One line for the gateway."""


class WrongWorkerError(RouterError):
    """Another process or another start of the worker; its new record will follow."""
