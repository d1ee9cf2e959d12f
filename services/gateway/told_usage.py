"""What the client of a prompt is told of its usage, whoever produced the answer. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.v1.common_pb2 import CachedTokens, Usage


@dataclass(slots=True)
class ToldUsage:
    """cached_tokens: of the prompt, as the first attempt that was admitted found them. first_attempt: 0 for none."""

    first_attempt: int = 0
    cached_tokens: int = 0

    def admitted(self, attempt: int, cached_tokens: int) -> bool:
        """An attempt has been admitted; whether it is the first, of which the client is told."""
        if self.first_attempt:
            return False
        self.first_attempt, self.cached_tokens = attempt, cached_tokens
        return True

    def complete(self, attempt: int, usage: Usage) -> CachedTokens:
        """The last attempt's usage becomes the client's; returns what that attempt found cached itself.

        Of the first attempt, where it was lost, only the sum of the cached tokens is known.
        """
        found = CachedTokens()
        found.CopyFrom(usage.cached)
        if attempt == self.first_attempt:
            self.cached_tokens = found.local + found.peer + found.ram + found.ssd
        else:
            usage.cached.CopyFrom(CachedTokens(local=self.cached_tokens))
        return found

    def without_an_end(self, prompt_tokens: int, output_tokens: int) -> Usage:
        """The usage of an answer whose last attempt was lost when it had told all but that."""
        return Usage(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, cached=CachedTokens(local=self.cached_tokens)
        )
