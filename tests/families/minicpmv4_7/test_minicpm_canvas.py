"""Positions and answers against transformers in float32."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from minicpm import MARKERS, check_media_answers, make_minicpm, part, random_media
from qwen_vision import replace_torchvision
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

import saccade
from encoder.item import Grid
from families import CheckpointError
from families.minicpmv4_7.positions import Markers, canvas_positions
from families.minicpmv4_7.vision import CanvasVision
from service.model.modelconfig import load_config

IDS = Markers(90, 91, 92, 93, 94)
IMAGE, VIDEO = 95, 96


@pytest.mark.parametrize("seed", range(12))
def test_logits_and_greedy_tokens(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and videos, next to each other and between text, with MLPs and with experts in the decoder."""
    replace_torchvision(monkeypatch)
    rng = random.Random(seed)
    tiny = make_minicpm(tmp_path, seed, canvas=True, moe=seed % 3 == 0)
    media = random_media(rng)
    text = rng.choice(["0<1 ", "\n", "\n\n"])
    check_media_answers(tiny, media, text, max_chunk=rng.choice([None, 7]), graphs=("off", "on")[seed % 2])


def random_prompt(rng: random.Random, merge: int) -> tuple[list[int], list[tuple[int, Grid]], list[int]]:
    """Ids of text, markers and image tokens; the blocks; and each block's kind."""
    ids: list[int] = [rng.randrange(90) for _ in range(rng.choice([0, 1, 5]))]
    blocks: list[tuple[int, Grid]] = []
    kinds: list[int] = []

    def crop(kind: int, tokens: Grid, first: int, last: int) -> None:
        ids.append(first)
        blocks.append((len(ids), (tokens[0] * merge, tokens[1] * merge)))
        kinds.append(kind)
        ids.extend([kind] * (tokens[0] * tokens[1]))
        ids.append(last)

    for _ in range(rng.randint(1, 4)):
        kind = rng.choice([IMAGE, VIDEO])
        frames = 1 if kind == IMAGE else rng.randint(1, 3)
        rows, columns = rng.choice([(0, 0), (1, 2), (2, 1), (1, 4), (3, 3), (2, 4)])
        size, slices = ((rng.randint(1, 6), rng.randint(1, 6)) for _ in range(2))

        for _ in range(frames):
            crop(kind, size, IDS.image_start, IDS.image_end)
            for row in range(rows):
                if row:
                    ids.append(IDS.newline)
                for _ in range(columns):
                    crop(kind, slices, IDS.slice_start, IDS.slice_end)
        ids += rng.choice([[], [IDS.newline], [IDS.newline] * 2, [3], [IDS.newline, 4], [5, IDS.newline], [6] * 7])
    return ids, blocks, kinds


@pytest.mark.parametrize("seed", range(150))
def test_positions_are_those_of_transformers(seed: int) -> None:
    rng = random.Random(seed)
    merge, mode = rng.choice([(4, "16x"), (2, "4x")])
    ids, blocks, kinds = random_prompt(rng, merge)
    oracle = SimpleNamespace(
        config=SimpleNamespace(downsample_mode=mode, **{f"{name}_id": token for name, token in IDS._asdict().items()}),
        _frame_end_idx=MiniCPMV4_7Model._frame_end_idx,
    )
    for name in ("_group_visual_frames", "get_vision_position_ids"):
        setattr(oracle, name, getattr(MiniCPMV4_7Model, name).__get__(oracle))
    sizes = {kind: [grid for (_, grid), own in zip(blocks, kinds) if own == kind] for kind in (IMAGE, VIDEO)}
    wanted, delta = MiniCPMV4_7Model.get_rope_index(
        oracle,  # type: ignore[arg-type]
        torch.tensor([ids]),
        torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]]),
        torch.tensor(sizes[IMAGE]).reshape(-1, 2),  # type: ignore[arg-type]
        torch.tensor(sizes[VIDEO]).reshape(-1, 2),  # type: ignore[arg-type]
    )
    found = canvas_positions(ids, blocks, IDS, merge_size=merge)
    assert torch.equal(torch.tensor(found.prompt).T, wanted[:, 0])
    assert found.delta == int(delta)


@pytest.mark.parametrize(
    ("ids", "blocks", "message"),
    [
        ([IMAGE, 91], [(0, (2, 2))], "1x1 image tokens at 0"),
        ([90, IMAGE, IMAGE], [(1, (2, 2)), (1, (2, 2))], "1x1 image tokens at 1 do not lie in places 2"),
        ([90, IMAGE], [(1, (4, 2))], "2x1 image tokens at 1 do not lie in places 1 to 1"),
        ([7, IMAGE, 91], [(1, (2, 2))], "at 1 follow token 7; they must follow that of <image>, 90, or of <slice>, 92"),
        ([90, IMAGE, IMAGE], [(1, (2, 2)), (2, (2, 2))], f"at 2 follow token {IMAGE}"),
    ],
)
def test_images_without_markers_are_refused(ids: list[int], blocks: list[tuple[int, Grid]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        canvas_positions(ids, blocks, IDS, merge_size=2)


def test_a_prompt_without_markers_is_one_requests_error(tmp_path: Path) -> None:
    tiny = make_minicpm(tmp_path, 1, canvas=True, slice_mode=True, max_slice_nums=4, use_image_id=False)
    image = part(random_media(random.Random(3))[0])
    image = image.get("image") or image["video"][0]
    with saccade.LocalClient(tmp_path, dtype="float32", max_seqs=2, max_len=512, threads=1, graphs="off") as client:
        layout = client.tokenize("x", images=[image])
        runs = 1 + layout.media[0].slices[0] * layout.media[0].slices[1]
        assert runs > 1
        with pytest.raises(saccade.errors.InvalidArgument, match="they must follow that of <image>"):
            client.generate([5] + [tiny.model.config.image_token_id] * runs, images=[image], max_tokens=2)
        assert client.generate("x", images=[image], max_tokens=2).token_ids


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, which tests copy before they change it."""
    return make_minicpm(tmp_path_factory.mktemp("model"), 0, canvas=True).path


@pytest.mark.parametrize("name", MARKERS)
@pytest.mark.parametrize("value", [None, 10**6, "x"])
def test_markers_are_checked(settings: Path, tmp_path: Path, name: str, value: object) -> None:
    shutil.copytree(settings, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {f"{name}_id": value}))
    with pytest.raises(CheckpointError, match=f"{name}_id .* is not a token id"):
        load_config(tmp_path)


def test_videos_are_not_numbered(tmp_path: Path) -> None:
    make_minicpm(tmp_path, 0, canvas=True, use_image_id=True)
    vision = load_config(tmp_path).vision
    assert isinstance(vision, CanvasVision) and vision.use_image_id and not vision.number_videos
