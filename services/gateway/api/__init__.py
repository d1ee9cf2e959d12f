"""The two public APIs: translations between what clients speak and the core."""
