"""What can go wrong in the router.

RouterError
├── BadAskError: the gateway's message makes no sense; it alone is refused
├── WrongWorkerError: who answers at a worker's address is not the worker that registered it
└── OperatorError: one line for whoever called the control API
    ├── InvalidOperationError: what was asked for makes no sense
    ├── LabelTakenError: the version label is another digest's
    ├── FailedPreconditionError: it cannot be done as things are
    ├── UnknownError: nobody here knows what was named
    ├── ConflictError: somebody else changed the same at the same time
    └── RedisSilentError: Redis does not answer
"""

from __future__ import annotations


class RouterError(Exception):
    """Base of the router's errors."""


class BadAskError(RouterError):
    """One line for the gateway."""


class WrongWorkerError(RouterError):
    """Another process or another start of the worker; its new record will follow."""


class OperatorError(RouterError):
    """One line for the operator."""


class InvalidOperationError(OperatorError):
    """What was asked for makes no sense."""


class LabelTakenError(OperatorError):
    """The version label is another digest's."""


class FailedPreconditionError(OperatorError):
    """It cannot be done as things are."""


class UnknownError(OperatorError):
    """Nobody here knows what was named."""


class ConflictError(OperatorError):
    """Somebody else changed the same at the same time."""


class RedisSilentError(OperatorError):
    """Redis does not answer: what was known goes on applying."""
