"""The same mesh with one container for each service."""
