"""Pull and push of KV blocks between the processes of a mesh: one protocol, two transports (UCX and gRPC)."""
