"""The other end of the plain socket in `bench.kv`: serves ranges of its memory, blocking, with nothing around them.

Prints its port; ends when its client has gone.
"""

from __future__ import annotations

import mmap
import socket
import struct
import sys

REQUEST = struct.Struct("<QQ")


def main() -> None:
    """Serve one client."""
    memory = memoryview(mmap.mmap(-1, int(sys.argv[1])))
    memory[:] = bytes(range(256)) * (len(memory) // 256)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(REQUEST.size, socket.MSG_WAITALL):
            offset, num_bytes = REQUEST.unpack(request)
            connection.sendall(memory[offset : offset + num_bytes])


if __name__ == "__main__":
    main()
