"""Clips through the whole service: against transformers in fp32, in all input forms, at their limits."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import FPS, animation, film, moving_frames, released_pixels, released_words
from images import encoded, png
from PIL import Image
from running import RunningEncoder, RunningServer
from served import IMAGE_TOKEN, make_served
from tiny_checkpoint import TinyCheckpoint
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import compute_retention_mask

import saccade
from encoder.frames import open_video
from families.nemotron_h_omni.vision import RadioVision
from service.model.checkpoint import Checkpoint
from service.model.tokenizer import Tokenizer

QUESTION = "what moves?"
LIMITS: dict[str, Any] = {"max_seqs": 4, "max_len": 900, "threads": 1}


def make_video_model(path: Path, seed: int, target: int = 24) -> TinyCheckpoint:
    tiny = make_served(path, seed, text={"pattern": ["M*-E", "ME*M", "*-", "MM"][seed % 4]})
    rule = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps(rule | {"video_target_num_patches": target}))
    return tiny


@pytest.fixture(scope="module")
def video_model(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_video_model(tmp_path_factory.mktemp("video") / "tiny", 21)


def vision_of(tiny: TinyCheckpoint) -> RadioVision:
    vision = Checkpoint(tiny.path).config.vision
    assert vision is not None
    return vision


@torch.no_grad()
def oracle(
    tiny: TinyCheckpoint, clip: list[torch.Tensor], rate: float, words: str, answer: list[int]
) -> tuple[torch.Tensor, int, int]:
    """(logits `[len(answer), V]` at the positions of `answer`, prompt tokens, video tokens), computed from
    transformers' parts, because its forward cannot take this family's clips: features, retention mask with the true
    shape, splice, decoder."""
    vision = vision_of(tiny)
    tower = tiny.model.vision_model
    tower.summary_idxs = tower.summary_idxs[:0]  # indices of class tokens that small towers do not have; not used here
    features = tiny.model.get_video_features(released_pixels(vision, clip)).pooler_output
    groups, tokens, hidden = features.shape
    flat = features.flatten(0, 1)
    kept = torch.ones(len(flat), dtype=torch.bool)
    if rate:
        # the mask takes a product of sides: any pair with the right one is the true shape
        shape = torch.tensor([groups, tokens, 1])
        kept = compute_retention_mask(video_embeds=flat, thw=shape, spatial_merge_size=1, q=rate)
    wide = words.replace("<image>", "<image>" * tokens)
    text = f"<|im_start|>user\n{wide}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor(Tokenizer(tiny.path / "tokenizer.json").encode(text))
    stays = torch.ones(len(ids), dtype=torch.bool)
    stays[ids == IMAGE_TOKEN] = kept
    ids = ids[stays]
    prompt = len(ids)
    ids = torch.cat([ids, torch.tensor(answer[:-1], dtype=torch.long)])
    decoder = tiny.model.language_model
    embedded = decoder.get_input_embeddings()(ids)
    rows = (ids == IMAGE_TOKEN).nonzero().flatten()[: int(kept.sum())]
    embedded[rows] = flat[kept].to(embedded.dtype)
    logits = decoder(inputs_embeds=embedded[None], use_cache=False).logits[0].float()
    return logits[prompt - 1 :], prompt, int(kept.sum())


def assert_is_the_oracle_s(answer: saccade.Generation, logits: torch.Tensor) -> None:
    expected = torch.log_softmax(logits, -1)
    scale = max(float(logits.abs().max()), 1.0)
    assert answer.logprobs is not None
    for place, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        ids = [top.token_id for top in entry.top]
        found = torch.tensor([top.logprob for top in entry.top])
        error = float((found - expected[place, ids]).abs().max())
        assert error <= 1e-4 * scale, f"place {place}: log-probabilities differ by {error} at a scale of {scale}"
        allowed = logits[place].clone()
        allowed[IMAGE_TOKEN] = -torch.inf
        assert float(allowed.max() - allowed[token]) <= 10 * max(error, 1e-6)


ASK: dict[str, Any] = {
    "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 100, "logit_bias": {IMAGE_TOKEN: -1e9},
}  # fmt: skip


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.8])
@pytest.mark.parametrize(
    ("seed", "frames", "height", "width", "target"),
    [
        pytest.param(0, 6, 40, 40, 24, id="square"),
        pytest.param(1, 5, 24, 60, 24, id="wide-odd"),
        pytest.param(2, 1, 61, 23, 24, id="tall-one"),
        pytest.param(3, 7, 20, 52, 40, id="wide-7"),
    ],
)
def test_answers_are_the_oracle_s(
    tmp_path: Path, seed: int, frames: int, height: int, width: int, target: int, rate: float, graphs: str
) -> None:
    tiny = make_video_model(tmp_path / "tiny", 30 + seed, target)
    clip = moving_frames(frames, height, width, seed)
    with saccade.LocalClient(
        tiny.path, dtype="float32", graphs=graphs, video_pruning_rate=rate, **LIMITS
    ) as client:  # fmt: skip
        video = saccade.Video([frame.numpy() for frame in clip], fps=FPS)
        answer = client.generate(QUESTION, videos=[video], **ASK)
        again = client.generate(QUESTION, videos=[video], **ASK)
        assert again.token_ids == answer.token_ids and again.usage == answer.usage, "from the cache"
        encoder = client._service.stats(integrity=True)["encoder"]
    words = released_words(frames, tokens=1, fps=FPS)
    logits, prompt, rows = oracle(tiny, clip, rate, words, answer.token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.video_tokens) == (prompt, rows)
    assert answer.usage.video_frames == frames and answer.usage.image_tokens == 0
    assert_is_the_oracle_s(answer, logits)
    groups = -(-frames // 2)
    assert encoder["temporal_patches"] == groups
    replays = sum(count for name, count in encoder.items() if name.startswith("replays_"))
    assert replays == (encoder["batches"] if graphs == "on" else 0)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "MP4", "WEBM"])
def test_files_are_sampled_and_dated(video_model: TinyCheckpoint, form: str) -> None:
    codecs = {"MP4": "mpeg4", "WEBM": "libvpx"}
    if form in codecs:
        data = film(form.lower(), codecs[form], frames=9)
    else:
        data = animation(moving_frames(9, 24, 40, 5), form)
    with saccade.LocalClient(video_model.path, dtype="float32", max_video_frames=4, **LIMITS) as client:
        answer = client.generate(QUESTION, videos=[data], **ASK)
        assert answer.token_ids == client.generate(QUESTION, videos=data, **ASK).token_ids
    opened = open_video(data)
    indices = [0, 2, 4, 6]
    clip = list(opened.frames(indices))
    words = released_words(4, tokens=1, fps=opened.fps, indices=indices)
    assert "Frame 1 sampled at 0.00 seconds and frame 2 sampled at " in words
    logits, prompt, rows = oracle(video_model, clip, 0.0, words, answer.token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.video_tokens, answer.usage.video_frames) == (prompt, rows, 4)
    assert_is_the_oracle_s(answer, logits)


@pytest.fixture(scope="module")
def video_server(video_model: TinyCheckpoint) -> Any:
    with RunningServer(str(video_model.path), video_pruning_rate=0.5, max_seqs=8, max_len=900) as running:
        yield running


@pytest.fixture
def video_client(video_server: RunningServer) -> Any:
    with saccade.Client(video_server.address) as client:
        yield client
    video_server.drained()


def test_every_form_gives_the_same_answer(
    video_client: saccade.Client, video_server: RunningServer, tmp_path: Path
) -> None:
    frames = moving_frames(5, 24, 40, 3)
    arrays = [frame.numpy() for frame in frames]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    lossless = animation(frames, "PNG")
    path = tmp_path / "clip.png"
    path.write_bytes(lossless)
    plain = video_client.generate(QUESTION, videos=[saccade.Video(arrays, fps=FPS)], **options)
    as_parts = [
        {
            "role": "user",
            "content": [{"type": "video", "video": arrays, "fps": FPS}, {"type": "text", "text": QUESTION}],
        }
    ]
    marked = [{"role": "user", "content": [{"type": "video"}, QUESTION]}]
    pillows = [Image.fromarray(array) for array in arrays]
    for prompt, videos in [
        (as_parts, ()),
        (marked, [saccade.Video(pillows, fps=FPS)]),
        (QUESTION, [saccade.Video(np.stack(arrays), fps=FPS)]),
        (QUESTION, [saccade.Video([encoded(pillow) for pillow in pillows], fps=FPS)]),
    ]:
        assert video_client.generate(prompt, videos=videos, **options) == plain
    by_file = video_client.generate(QUESTION, videos=[str(path)], **options)
    assert by_file == video_client.generate(QUESTION, videos=[lossless], **options)
    assert by_file == video_client.generate(QUESTION, videos=[io.BytesIO(lossless)], **options)
    assert by_file.usage.video_tokens == plain.usage.video_tokens

    async def ask() -> saccade.Generation:
        async with saccade.AsyncClient(video_server.address) as other:
            return await other.generate(QUESTION, videos=[lossless], **options)

    assert asyncio.run(ask()) == by_file
    with saccade.LocalClient(
        video_server.options.model, dtype="float32", video_pruning_rate=0.5, **LIMITS
    ) as local:  # fmt: skip
        assert local.generate(QUESTION, videos=[lossless], **options) == by_file


def test_images_and_clips_share_a_prompt(video_client: saccade.Client) -> None:
    """Alone or among others, in chunks or from the cache: a clip's rows are placed at its text."""
    clip = animation(moving_frames(6, 24, 40, 1), "GIF")
    content = [
        "first ", {"type": "image", "image": png(3)}, {"type": "video", "video": clip}, "then",
        {"type": "video", "video": animation(moving_frames(3, 40, 24, 2), "GIF"), "max_frames": 2},
    ]  # fmt: skip
    messages = [{"role": "user", "content": content}]
    options: dict[str, Any] = {"max_tokens": 8, "seed": 1, "temperature": 1.0, "n": 3}
    whole = video_client.generate(messages, **options)
    assert whole.usage.video_frames == 8 and whole.usage.video_tokens > 0 < whole.usage.image_tokens
    told = video_client.tokenize(messages)
    assert (told.prompt_tokens, told.image_tokens, told.video_tokens) == (
        whole.usage.prompt_tokens, whole.usage.image_tokens, whole.usage.video_tokens,
    )  # fmt: skip
    assert sum(told.tokens_per_video) == told.video_tokens and len(told.tokens_per_video) == 2
    assert told.media == whole.media and [item.frames for item in told.media] == [0, 6, 2]
    assert [item.tokens for item in told.media[1:]] == told.tokens_per_video
    videos = [saccade.Video(content[2]["video"]), saccade.Video(content[4]["video"], max_frames=2)]  # type: ignore[index]
    again = video_client.generate(told.token_ids, images=[png(3)], videos=videos, **options)
    assert [s.token_ids for s in again.samples] == [s.token_ids for s in whole.samples]
    raw = video_client.generate("<image> and <image>?", raw=True, images=[png(3)], videos=videos[:1], max_tokens=3)
    assert raw.usage.video_frames == 6
    first = video_client.generate("no places", raw=True, images=[png(3)], videos=videos[:1], max_tokens=3)
    assert first.usage.video_tokens == raw.usage.video_tokens
    one_id = video_client.generate([9, IMAGE_TOKEN, 12], videos=videos[:1], max_tokens=3)
    assert one_id.usage.prompt_tokens == 2 + one_id.usage.video_tokens


def test_limits_are_named_with_both_numbers(
    video_client: saccade.Client, video_server: RunningServer, local: saccade.LocalClient
) -> None:
    clip = animation(moving_frames(3, 16, 16, 1), "GIF")
    refused = [
        ([saccade.Video(clip, max_frames=33)], "max_frames is 33; it must be from 1 to 32", "INVALID_ARGUMENT"),
        ([saccade.Video(clip, max_frames=0)], "max_frames is 0; it must be from 1 to 32", "INVALID_ARGUMENT"),
        ([clip] * 5, "videos is 5; it must be from 0 to 4", "INVALID_ARGUMENT"),
        ([b"no clip at all"], "recognised in these 14 bytes", "VIDEO_DECODE_FAILED"),
        ([clip[: len(clip) // 2]], "prompt.videos[0]", "VIDEO_DECODE_FAILED"),
        ([[png(1, (8, 8)), png(2, (8, 9))]], "frame 1 has 9x8 pixels, the first 8x8", "INVALID_ARGUMENT"),
        ([[png(1), b"broken"]], "frame 1: no PNG", "VIDEO_DECODE_FAILED"),
        ([saccade.Video([png(1)], fps=0.0)], "fps is 0; it must be from 1e-06 to 1000", "INVALID_ARGUMENT"),
    ]
    for videos, words, reason in refused:
        with pytest.raises(saccade.errors.InvalidArgument) as error:
            video_client.generate(QUESTION, videos=videos, max_tokens=2)
        assert words in str(error.value) and error.value.reason == reason
    with saccade.LocalClient(
        video_server.options.model, dtype="float32", max_video_file_frames=2, max_video_bytes=4096, **LIMITS
    ) as small:  # fmt: skip
        for videos, words in [
            ([clip], "3 frames, more than the 2 that are allowed"),
            ([b"GIF89a" + bytes(5000)], "5006 bytes, more than the 4096 that are allowed"),
        ]:
            with pytest.raises(saccade.errors.InvalidArgument) as error:
                small.generate(QUESTION, videos=videos, max_tokens=2)
            assert words in str(error.value) and error.value.reason == "VIDEO_TOO_LARGE"
    with pytest.raises(saccade.errors.InvalidArgument, match="one image; a clip is a file or a list"):
        video_client.generate(QUESTION, videos=[np.zeros((4, 4, 3), np.uint8)])
    assert video_client.get_model().takes_videos and video_client.get_model().limits.max_video_frames == 32


def test_a_checkpoint_without_the_projection_takes_no_clips(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny = make_video_model(tmp_path / "tiny", 5)
    (weights,) = tiny.path.glob("*.safetensors")
    save_file({name: value for name, value in load_file(weights).items() if "video_embedder" not in name}, weights)
    with saccade.LocalClient(tiny.path, dtype="float32", **LIMITS) as client:
        assert not client.get_model().takes_videos
        with pytest.raises(saccade.errors.FailedPrecondition, match="takes no videos"):
            client.generate(QUESTION, videos=[animation(moving_frames(2, 16, 16, 1), "GIF")])


@pytest.mark.parametrize("where", ["another process", "another server"])
def test_an_encoder_elsewhere_gives_the_same(
    video_client: saccade.Client, video_server: RunningServer, where: str
) -> None:
    """The counts of a pruned clip's rows are returned with them."""
    videos = [saccade.Video([frame.numpy() for frame in moving_frames(6, 16, 24, 4)], fps=FPS)]
    videos.append(saccade.Video(animation(moving_frames(5, 40, 24, 5), "GIF")))
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    model, pruned = video_server.options.model, {"video_pruning_rate": 0.5}
    with contextlib.ExitStack() as running:
        elsewhere: dict[str, Any] = {"encoder_process": True}
        if where == "another server":
            encoder = running.enter_context(RunningEncoder(model, **pruned))
            elsewhere = {"role": "decoder", "encoders": (encoder.address,)}
        apart = running.enter_context(RunningServer(model, max_seqs=8, max_len=900, **pruned, **elsewhere))
        client = running.enter_context(saccade.Client(apart.address))
        for video in videos:
            answer = client.generate(QUESTION, videos=[video], **options)
            assert answer == video_client.generate(QUESTION, videos=[video], **options)


def test_batch_rows_name_clips(video_client: saccade.Client, tmp_path: Path) -> None:
    clip = animation(moving_frames(8, 24, 24, 1), "GIF")
    (tmp_path / "clip.gif").write_bytes(clip)
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(png(i, (16, 16)))
    parts = [
        {"type": "video_url", "video_url": {"url": "clip.gif"}},
        {"type": "video", "video": "clip.gif", "max_frames": 2},
        {"type": "video", "video": ["0.png", "1.png"], "fps": 2},
    ]
    rows = [
        {
            "custom_id": str(i), "method": "POST", "url": "/v1/chat/completions",
            "body": {"max_tokens": 3, "messages": [{"role": "user", "content": [part]}]},
        }
        for i, part in enumerate(parts)
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    video_client.run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", ordered=True)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    details = [line["response"]["body"]["usage"]["prompt_tokens_details"] for line in lines]
    assert all(detail["video_tokens"] > 0 == detail["image_tokens"] for detail in details)
    assert details[1]["video_tokens"] < details[0]["video_tokens"]
