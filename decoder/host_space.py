"""Space in host memory for what preempted sequences have computed."""

from __future__ import annotations


class HostSpace:
    """Counts the bytes that requests hold in host memory, in total at most `limit`, unless the caller of `hold` exceeds
    it (see `fits`)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._held: dict[str, int] = {}

    def fits(self, size: int) -> bool:
        return self.used + size <= self.limit

    def hold(self, request_id: str, size: int) -> None:
        self._held[request_id] = size
        self.used += size

    def release(self, request_id: str) -> None:
        """Releases what a request holds, because its copy has been read. `KeyError` if it holds nothing."""
        self.used -= self._held.pop(request_id)

    def forget(self, request_id: str) -> None:
        """Releases what a request holds, if anything, because its copy is no longer needed."""
        if request_id in self._held:
            self.release(request_id)

    def check_integrity(self, swapped: set[str]) -> None:
        """`AssertionError` unless exactly these requests hold space, and the sum is right."""
        assert self.used == sum(self._held.values())
        assert set(self._held) == swapped
