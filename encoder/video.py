"""From decoded frames to temporal patches, and the words that stand between them in a prompt.

The released processor resizes every frame of a clip to one grid near a target, keeping the shape of the picture, and
the tower takes frames in groups: the patch of a group is the same patch of each of its frames, one frame after the
other. A clip's last frame is repeated until its group is full. Each group is one attention sequence, on its own in the
tower, so a long clip passes in as many launches as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from encoder.config import RGB, VisionConfig
from encoder.item import VIDEO, EncoderItem, num_image_tokens
from encoder.preprocess import Stopwatch, cut_patches, normalise, resize_pixels
from encoder.pruning import retained_tokens


def temporal_patch(config: VisionConfig) -> int:
    """Frames in one temporal patch. `ValueError` for a model without a video projection."""
    if config.video_temporal_patch_size is None:
        raise ValueError("this model takes no video: its tower has no projection for temporal patches")
    return config.video_temporal_patch_size


def video_grid(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
    """The patch grid `(gh, gw)` of every frame of a clip of `height` x `width` pixels."""
    if height < 1 or width < 1:
        raise ValueError(f"a frame needs at least one pixel each way, got {height}x{width}")
    target, merge = config.video_target_num_patches, config.merge_size
    if not config.video_maintain_aspect_ratio:
        side = max(merge, int(math.sqrt(target)) // merge * merge)
        return side, side
    aspect = width / height
    rows = max(round(math.sqrt(target / aspect)), 1)
    columns = max(round(math.sqrt(target * aspect)), 1)
    up = (-(-rows // merge) * merge, -(-columns // merge) * merge)
    if up[0] * up[1] <= target:
        return up
    return max(merge, rows // merge * merge), max(merge, columns // merge * merge)


def video_tokens(num_frames: int, grid: tuple[int, int], config: VisionConfig, *, pruning_rate: float = 0.0) -> int:
    """Rows that a clip gives the decoder, before anything is decoded. `ValueError` without frames or a projection."""
    if num_frames < 1:
        raise ValueError(f"a clip needs a frame, got {num_frames}")
    groups = -(-num_frames // temporal_patch(config))
    return retained_tokens(groups, num_image_tokens(grid, merge_size=config.merge_size), pruning_rate)


def patchify_video(
    frames: Iterable[torch.Tensor], config: VisionConfig, dtype: torch.dtype, *, num_frames: int | None = None,
    pruning_rate: float = 0.0, keep_bytes: bool = False, watch: Stopwatch | None = None,
) -> EncoderItem:  # fmt: skip
    """Resize, normalise and cut a clip, one group of frames at a time.

    `frames`: `[H, W, 3]` uint8, all of one size; taken one by one, so a generator keeps a single group in memory, and
    then says in `num_frames` how many it yields. Returns new memory in `dtype`; with `keep_bytes` in uint8 where no
    frame needs a resize, as `patchify`. Raises `ValueError` naming the first frame that does not fit, or both counts
    where they differ.
    """
    together = temporal_patch(config)
    if num_frames is None:
        frames = list(frames)
        num_frames = len(frames)
    if num_frames < 1:
        raise ValueError(f"a clip needs a frame, got {num_frames}")
    watch = watch or Stopwatch()
    grid, patches, size, kept, cut_only = (0, 0), torch.empty(0), (0, 0), dtype, False
    first: tuple[int, ...] = ()
    index = -1
    for index, frame_HWC in enumerate(frames):
        shape = tuple(frame_HWC.shape)
        if len(shape) != 3 or shape[2] != RGB or frame_HWC.dtype != torch.uint8:
            raise ValueError(f"frame {index}: expected [H, W, 3] uint8 pixels, got {shape} {frame_HWC.dtype}")
        if not index:
            first, grid = shape, video_grid(shape[0], shape[1], config)
            groups = -(-num_frames // together)
            size = (grid[0] * config.patch_size, grid[1] * config.patch_size)
            cut_only = keep_bytes and size == shape[:2]
            kept = torch.uint8 if cut_only else dtype
            patches = torch.empty(groups, grid[0] * grid[1], together, config.patch_dim, dtype=kept)
        if shape != first:
            raise ValueError(f"frame {index} has {shape[0]}x{shape[1]} pixels, the first {first[0]}x{first[1]}")
        if index >= num_frames:
            raise ValueError(f"frame {index} of a clip of {num_frames} frames")
        pixels_CHW = frame_HWC.permute(2, 0, 1)
        if not cut_only:
            with watch("resize"):
                pixels_CHW = resize_pixels(pixels_CHW[None], size)[0]
        with watch("patch"):
            cut = cut_patches(pixels_CHW if cut_only else normalise(pixels_CHW, config), config.patch_size, kept)
            patches[index // together, :, index % together] = cut
    if index + 1 != num_frames:
        raise ValueError(f"{index + 1} frames of a clip of {num_frames}")
    last = index % together
    patches[-1, :, last + 1 :] = patches[-1, :, last : last + 1]
    return EncoderItem(
        grid, patches.view(-1, together * config.patch_dim), kind=VIDEO, num_sequences=len(patches),
        num_frames=num_frames, pruning_rate=pruning_rate, merge_size=config.merge_size,
    )  # fmt: skip


def sample_indices(total: int, count: int) -> list[int]:
    """Which of `total` frames to take for at most `count`: evenly spaced from the first, all where they are few."""
    if total < 1 or count < 1:
        raise ValueError(f"{count} of {total} frames: both must be positive")
    if count >= total:
        return list(range(total))
    return [index * total // count for index in range(count)]


def frame_labels(
    num_frames: int, together: int, *, fps: float | None = None, indices: Sequence[int] | None = None
) -> list[str]:
    """The words before each temporal patch, as the released processor writes them: `Frame 1 and frame 2: `.

    With `fps` of the source they say when: by the frames' `indices` in the source, in whole milliseconds of a frame,
    where those are given, else as if the frames followed each other at that rate.
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
    """A clip in a prompt: each label, then `start`, one `token` for each row of that temporal patch, and `end`.

    `rows` are what the runner says stayed of each. Pruned to nothing, a temporal patch keeps its label and its pair.
    """
    if len(labels) != len(rows):
        raise ValueError(f"{len(labels)} labels for {len(rows)} temporal patches")
    return "\n".join(label + start + token * count + end for label, count in zip(labels, rows))
