"""Model artifacts as files: digests and manifests, fast reading, the local cache, copies. No tensors, no torch."""
