"""Small conversions between Python values and the protobufs of Envoy's API."""

from __future__ import annotations

from envoy.config.core.v3 import address_pb2
from google.protobuf import any_pb2, duration_pb2, message, wrappers_pb2

from deploy.envoy.settings import Address


def packed(inner: message.Message) -> any_pb2.Any:
    """`inner` as a typed Any."""
    result = any_pb2.Any()
    result.Pack(inner)
    return result


def seconds(value: float) -> duration_pb2.Duration:
    """A duration; 0 means "off" in the fields it is used for."""
    result = duration_pb2.Duration()
    result.FromMilliseconds(round(value * 1000))
    return result


def uint32(value: int) -> wrappers_pb2.UInt32Value:
    """A present 32-bit value."""
    return wrappers_pb2.UInt32Value(value=value)


def boolean(value: bool) -> wrappers_pb2.BoolValue:
    """A present boolean."""
    return wrappers_pb2.BoolValue(value=value)


def socket_address(address: Address) -> address_pb2.Address:
    """A TCP address."""
    return address_pb2.Address(socket_address=address_pb2.SocketAddress(address=address.host, port_value=address.port))
