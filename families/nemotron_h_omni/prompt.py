"""A clip's part of a prompt, as the released processor writes it."""

from __future__ import annotations

from collections.abc import Sequence


def frame_labels(
    num_frames: int, together: int, *, fps: float | None = None, indices: Sequence[int] | None = None
) -> list[str]:
    """The text before each temporal patch, as the released processor writes it: `Frame 1 and frame 2: `.

    With the source's `fps` the text includes each frame's time: computed from the frame's index in the source
    (`indices`) with a frame duration of whole milliseconds, or, without indices, as if the frames were consecutive.
    Raises `ValueError` unless `num_frames` and `together`, the frames of a temporal patch, are positive.
    """
    if num_frames < 1 or together < 1:
        raise ValueError(f"{num_frames} frames in groups of {together}: both must be positive")

    def moment(frame: int) -> str:
        if not fps:
            return ""
        known = indices is not None and frame < len(indices)
        seconds = indices[frame] * int(1000.0 / fps) / 1000.0 if indices is not None and known else frame / fps
        return f" sampled at {seconds:.2f} seconds"

    labels = []
    for first in range(0, num_frames, together):
        group = range(first, min(first + together, num_frames))
        words = (f"{'frame' if frame > first else 'Frame'} {frame + 1}{moment(frame)}" for frame in group)
        labels.append(" and ".join(words) + ": ")
    return labels


def video_text(labels: Sequence[str], rows: Sequence[int], *, start: str, token: str, end: str) -> str:
    """A clip's part of a prompt: for each temporal patch its label, `start`, one `token` per row, and `end`.

    `rows`: rows of each temporal patch after pruning. A temporal patch with no rows left keeps its label and wrappers.
    """
    if len(labels) != len(rows):
        raise ValueError(f"{len(labels)} labels for {len(rows)} temporal patches")
    return "\n".join(label + start + token * count + end for label, count in zip(labels, rows))
