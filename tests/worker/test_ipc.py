"""Links between a worker's processes."""

from __future__ import annotations

import fcntl
import socket

from services.worker.engine_messages import DrainEngine, FromFrontToEngine
from services.worker.ipc import Link, wait_links
from services.worker.messages import Message


def _with_descriptor_above(least: int, sock: socket.socket) -> socket.socket:
    with sock:
        return socket.socket(fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, least))


def test_a_process_with_many_descriptors_waits_too() -> None:
    far, near = (_with_descriptor_above(1100, end) for end in socket.socketpair())
    with far, near:
        sending: Link[Message] = Link(far, FromFrontToEngine)
        receiving: Link[Message] = Link(near, FromFrontToEngine)
        assert not wait_links([receiving], 0.01)
        sending.send(DrainEngine())
        assert wait_links([receiving], 5.0)
        assert receiving.receive() == [DrainEngine()]
