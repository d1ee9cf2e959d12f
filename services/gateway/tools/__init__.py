"""Tool calls: how they are written in an answer, what holds an answer to them, and what is read back."""
