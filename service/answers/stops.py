"""Finds stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until one of `stops` appears, which itself is never passed on. Text that may be the beginning of a
    stop string is held back until more text shows whether it is."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._overlaps = [0] * len(self._stops)
        """For each stop string: the length of the longest suffix of the held text that is a prefix of it."""
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Adds text; returns the text that can be sent now. After a match `matched` is set and the rest is dropped."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, _, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        self._overlaps = [
            self._overlap(stop, before + len(text)) for stop, before in zip(self._stops, self._overlaps, strict=True)
        ]
        keep = max(self._overlaps)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The text that was held back and is not part of a stop string, at the end of the answer."""
        shown, self._held = self._held, ""
        return "" if self.matched is not None else shown

    def _overlap(self, stop: str, most: int) -> int:
        """Length of the longest suffix of the held text that is a prefix of `stop`; it is known to be at most `most`.
        With that bound, all calls for one stop string together compare as many times as there are characters."""
        for length in range(min(len(stop) - 1, most), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
