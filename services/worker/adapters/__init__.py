"""Low-rank adapters of a worker: which are resident, who waits for one, and loading them beside the engine's loop."""
