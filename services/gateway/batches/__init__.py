"""Files, and batches of requests read from them: OpenAI's API for work that may wait."""
