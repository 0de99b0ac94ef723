"""Videos: each frame is one tile, with its own label in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from encoder.item import ItemLayout
from families.nemotron_h_omni.video_rule import OmniVideoRule

PREFIX = "This is a video:\n"


class FrameVideoRule(OmniVideoRule):
    """Implements `families.family.VideoRule`: `OmniVideoRule` with one frame in each temporal patch, all of the size of
    a tile, and with the sampling and the text of the released code."""

    def sample(self, total: int, count: int) -> list[int]:
        """Indices of at most `count` of `total` frames: evenly spaced from the first to the last, rounded to the
        nearest, half to even; of several with the same index one is taken."""
        if total < 1 or count < 1:
            raise ValueError(f"{count} of {total} frames: both must be positive")
        if count >= total:
            return list(range(total))
        import numpy as np  # imported here: a frontend process without videos needs none

        return list(dict.fromkeys(np.linspace(0, total - 1, count).round().astype(int).tolist()))

    def sample_file(self, total: int, count: int, fps: Callable[[], float | None]) -> list[int]:
        """Like `sample`: the source's frame rate is not used."""
        return self.sample(total, count)

    def text(self, item: ItemLayout, labels: Sequence[str], number: int, *, start: str, token: str, end: str) -> str:
        """A line that announces the video, then a line for each frame: its label, and `token` in `start` and `end`."""
        return PREFIX + "".join(f"{label}{start}{token}{end}\n" for label in labels)
