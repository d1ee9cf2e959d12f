"""Stop strings over text that arrives in pieces. Pure.

One Knuth-Morris-Pratt automaton for each stop string, fed a character at a time, so that the result does not depend
on the pieces: the output ends before the stop string that is complete first (the longest of those that end there).
Text that may still become a stop string is held back.
"""

from __future__ import annotations


def prefix_function(pattern: str) -> list[int]:
    """table[i]: length of the longest proper prefix of pattern[:i+1] that is also its suffix (Knuth et al., 1977)."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table


class StopStrings:
    """The stop strings of a request with their tables; shared by its choices."""

    __slots__ = ("patterns", "starts", "tables")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = patterns
        self.tables = [prefix_function(pattern) for pattern in patterns]
        self.starts = frozenset(pattern[0] for pattern in patterns)


class StopMatcher:
    """State of one choice."""

    __slots__ = ("_held", "_matched", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._matched = [0] * len(stops.patterns)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string that ended the output, if one did."""
        if not self._held and self._stops.starts.isdisjoint(text):
            return text, None
        for position, character in enumerate(text):
            hit = self._advance(character)
            if hit is not None:
                whole = self._held + text[: position + 1]
                self._held = ""
                return whole[: len(whole) - len(hit)], hit
        whole = self._held + text
        keep = max(self._matched)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        """The text held back, when the output has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        hit: str | None = None
        for i, (pattern, table) in enumerate(zip(self._stops.patterns, self._stops.tables, strict=True)):
            length = self._matched[i]
            while length and pattern[length] != character:
                length = table[length - 1]
            if pattern[length] == character:
                length += 1
            if length == len(pattern):
                if hit is None or len(pattern) > len(hit):
                    hit = pattern
                length = table[length - 1]
            self._matched[i] = length
        return hit
