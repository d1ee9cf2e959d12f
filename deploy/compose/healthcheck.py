"""Container health: exit status 0 when the service of this container says that it is serving."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ADDRESS = "127.0.0.1:7600"
_TIMEOUT_S = 2.0


def main() -> int:
    """Ask once."""
    with grpc.insecure_channel(ADDRESS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
