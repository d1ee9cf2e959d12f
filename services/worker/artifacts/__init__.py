"""How a worker comes by a model: local cache, peers, shared storage; and how it serves others from its cache."""
