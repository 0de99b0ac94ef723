"""Resources that a request holds while it is prepared and after: limits, accounting, and waiting."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine

from encoder.frames import Clip
from encoder.images import Pixels
from encoder.media_limits import ImageError
from families import VisionSpec
from service.answers.bounds import FrontendLimits
from service.answers.frontend import Frontend
from service.answers.prepare import MediaThreads
from service.common import errors
from service.common.config import ServerOptions
from service.common.types import (
    ChatInput,
    Delta,
    Finished,
    GenerateSpec,
    Image,
    ImageInput,
    MediaSource,
    Message,
    RawInput,
    TokensInput,
    Video,
)
from service.engine.types import EngineEvent, EngineRequest
from service.media.images import MediaLimits
from service.media.patches import Patcher
from service.model.assets import ModelAssets
from service.model.chat import ChatTemplate
from service.servers.from_options import load_assets

GREY = np.full((32, 32, 3), 99, np.uint8)


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(ServerOptions())


class Held(Clip):
    """Two frames; the second is delivered when the test allows it."""

    def __init__(self, decoder: Controlled, frames: Sequence[Pixels]) -> None:
        self._decoder, self._frames = decoder, frames

    @property
    def num_frames(self) -> int:
        return len(self._frames)

    @property
    def fps(self) -> float | None:
        return 2.0

    def arrays(self, indices: Sequence[int]) -> Any:
        self._decoder.borrowed += 1
        try:
            for index in indices:
                self._decoder.wait()
                yield self._frames[index]
        finally:
            self._decoder.borrowed -= 1


class Controlled(Patcher):
    """Files wait until the test lets them continue; `bad` ones fail at once."""

    def __init__(self, limits: MediaLimits, vision: VisionSpec) -> None:
        super().__init__(limits, vision, "float32")
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        self.decoded: list[bytes] = []
        self.borrowed = 0
        self.of_clip: list[Pixels] = [GREY, GREY]

    def wait(self) -> None:
        self.begun.release()
        assert self.go_on.wait(60)

    def pixels(self, data: bytes) -> Pixels:
        if data == b"bad":
            raise ImageError("it is bad")
        if data != b"quick":
            self.wait()
        self.decoded.append(data)
        return GREY

    def clip(self, data: bytes) -> Clip:
        return Held(self, self.of_clip)

    def close(self) -> None:
        self.go_on.set()


def with_frontend(
    assets: ModelAssets, body: Callable[[Frontend, Controlled], Awaitable[None]], *, engine: FakeEngine | None = None,
    workers: int = 2, limits: FrontendLimits | None = None,
) -> None:  # fmt: skip
    engine = engine or FakeEngine(vocabulary=64)
    engine.info = replace(engine.info, takes_video=True)

    async def run() -> None:
        limits_ = limits or FrontendLimits()
        assert assets.vision is not None
        decoder = Controlled(limits_.media, assets.vision)
        frontend = Frontend(engine, assets, limits_, workers=workers, processor=decoder)
        frontend.start()
        try:
            async with asyncio.timeout(30):
                await body(frontend, decoder)
            assert frontend.stats()["held_bytes"] == 0 and frontend.live == 0
        finally:
            decoder.go_on.set()
            await asyncio.to_thread(frontend.close)

    asyncio.run(run())


def spec(*media: MediaSource, name: str = "r", **fields: Any) -> GenerateSpec:
    given = {"sampling": {"max_tokens": 2}, "media": media, **fields}
    return GenerateSpec(
        name, "", given.pop("input", ChatInput((Message("user", (*[None] * len(media), "?")),))), **given
    )


async def ask(frontend: Frontend, request: GenerateSpec) -> list[Any]:
    return [event async for event in frontend.stream(request)]


async def begun(decoder: Controlled, count: int = 1) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(decoder.begun.acquire, True, 60)


def image(data: bytes = b"slow", number: int = 0) -> Image:
    return Image(data, f"images[{number}]")


def test_a_request_without_a_token_frees_its_room_at_its_end(assets: ModelAssets) -> None:
    """One that is refused when its images are decoded, and one that needs only the number of its tokens."""

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        decoder.go_on.set()
        with pytest.raises(errors.InvalidArgument) as refused:
            await ask(frontend, spec(image(), sampling={"temperature": -1.0}))
        assert refused.value.field == "sampling.temperature" and frontend.stats()["held_bytes"] == 0
        await frontend.tokenize(spec(image()))

    with_frontend(assets, body)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [-(2**31), -1, 0, 33, 2**31 - 1])
def test_frames_that_no_video_may_ask_for_leave_the_account_alone(assets: ModelAssets, frames: int) -> None:
    async def body(frontend: Frontend, decoder: Controlled) -> None:
        with pytest.raises(
            errors.InvalidArgument, match=f"v.max_frames is {frames}; it must be from 1 to 32"
        ) as refused:
            await ask(frontend, spec(Video(b"quick", "v", max_frames=frames)))
        assert refused.value.field == "v.max_frames" and frontend.stats()["held_bytes"] == 0
        decoder.go_on.set()
        await ask(frontend, spec(Video(b"", "v", max_frames=1)))
        await ask(frontend, spec(Video(b"", "v", max_frames=32)))

    with_frontend(assets, body)


def test_a_list_of_frames_is_counted_before_any_is_fetched(assets: ModelAssets) -> None:
    limits = FrontendLimits(media=replace(MediaLimits(), video=replace(MediaLimits().video, max_frames=3)))

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        async def never(given: GenerateSpec, salt: bytes) -> GenerateSpec:
            raise AssertionError("something was fetched")

        frontend.resolve = never
        frames = tuple(Image(b"", "f", uri="https://a/b") for _ in range(4))
        with pytest.raises(errors.InvalidArgument, match="v.frames has 4 frames; at most 3 are allowed") as refused:
            await ask(frontend, spec(Video(b"", "v", frames=frames)))
        assert refused.value.reason == "VIDEO_TOO_LARGE"
        await ask(frontend, spec(Video(b"", "v", frames=(image(b"quick"),) * 3)))

    with_frontend(assets, body, limits=limits)


def test_only_frames_that_are_looked_at_are_fetched(assets: ModelAssets) -> None:
    asked: list[str] = []

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        async def fetch(given: GenerateSpec, salt: bytes) -> GenerateSpec:
            (video,) = given.media
            assert isinstance(video, Video) and len(video.frames) == 100 and video.fps == 4.0
            asked.extend(frame.uri for frame in video.frames if frame.uri is not None)
            frames = tuple(replace(f, data=b"quick", uri=None) if f.elsewhere else f for f in video.frames)
            return replace(given, media=(replace(video, frames=frames),))

        frontend.resolve = fetch
        frames = tuple(Image(b"", f"f{i}", uri=str(i)) for i in range(100))
        await ask(frontend, spec(Video(b"", "v", frames=frames, fps=4.0, max_frames=4)))
        assert asked == ["0", "25", "50", "75"]
        asked.clear()
        await ask(frontend, spec(Video(b"", "v", frames=frames, fps=4.0)))
        assert len(asked) == 32

    with_frontend(assets, body)


# -- accounts ----------------------------------------------------------------------------------------------------------


def test_a_bad_image_ends_its_call_when_the_others_are_over(assets: ModelAssets) -> None:
    """The call waits for files whose decoding has started and accounts for them; the others are never started."""

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        sources = (image(b"slow 0", 0), image(b"bad", 1), *(image(b"slow %d" % i, i) for i in range(2, 8)))
        call = asyncio.create_task(ask(frontend, spec(*sources)))
        await begun(decoder)
        while len(asyncio.all_tasks()) > 5:  # this one, the call's two, and those of files whose decoding has started
            await asyncio.sleep(0.001)
        assert not call.done() and frontend.live == 1 and frontend.stats()["held_bytes"] > 0
        decoder.go_on.set()
        with pytest.raises(errors.InvalidArgument, match=r"images\[1\]: it is bad"):
            await call
        assert len(decoder.decoded) <= 2, "the images behind it were given up"

    with_frontend(assets, body)


def test_errors_of_several_files_are_all_looked_at(assets: ModelAssets) -> None:
    """One error is raised; asyncio must not report the others as never retrieved."""
    reported: list[dict[str, Any]] = []

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        with pytest.raises(errors.InvalidArgument):
            await ask(frontend, spec(image(b"bad", 0), image(b"bad", 1), image(b"bad", 2)))
        gc.collect()

    with_frontend(assets, body)
    assert not reported


def test_a_video_that_waits_does_not_hide_the_error_of_an_image(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, decoder: Controlled) -> None:
        other = asyncio.create_task(ask(frontend, spec(Video(b"long", "v"), name="other")))
        await begun(decoder)
        with pytest.raises(errors.InvalidArgument, match="it is bad"):
            await ask(frontend, spec(Video(b"behind it", "v"), image(b"bad")))
        decoder.go_on.set()
        await other

    with_frontend(assets, body)


def test_a_call_that_is_cancelled_keeps_its_room_until_its_images_are_over(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, decoder: Controlled) -> None:
        call = asyncio.create_task(ask(frontend, spec(image())))
        await begun(decoder)
        for _ in range(3):
            call.cancel()
            await asyncio.wait({call}, timeout=0.02)
            assert not call.done() and frontend.stats()["held_bytes"] > 0
        decoder.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    with_frontend(assets, body)


@pytest.mark.parametrize("kind", ["stream", "embed", "tokenize"])
@pytest.mark.parametrize("source", [image(), Video(b"long", "v")], ids=["image", "video"])
def test_a_request_that_is_cancelled_ends_at_once_and_its_file_keeps_its_room(
    assets: ModelAssets, source: MediaSource, kind: str
) -> None:
    """While the process that decodes the file goes on with it."""

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        given = spec(source)
        call = asyncio.create_task(ask(frontend, given) if kind == "stream" else getattr(frontend, kind)(given))
        await begun(decoder)
        assert frontend.cancel("r")
        if kind == "stream":
            assert [event.reason for event in await call if isinstance(event, Finished)] == ["aborted"]
        else:
            with pytest.raises(errors.Cancelled, match="the request was cancelled"):
                await call
        assert frontend.live == 0 and frontend.stats()["held_bytes"] > 0
        decoder.go_on.set()
        while frontend.stats()["held_bytes"]:
            await asyncio.sleep(0.001)
        await ask(frontend, given)

    with_frontend(assets, body)


@pytest.mark.parametrize("how", ["cancelled", "late"])
@pytest.mark.parametrize("source", [Image(b"next", "i"), Video(b"next", "v")], ids=["image", "video"])
def test_a_call_whose_file_waits_for_a_process_ends_at_once(assets: ModelAssets, source: MediaSource, how: str) -> None:
    """Two processes decode a video and an image, each for longer than the third call may take."""

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        others = [asyncio.create_task(ask(frontend, spec(Video(b"long", "v"), name="video")))]
        others.append(asyncio.create_task(ask(frontend, spec(image(b"slow"), name="image"))))
        await begun(decoder, 2)
        held = frontend.stats()["held_bytes"]
        if how == "late":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await ask(frontend, spec(source))
        else:
            call = asyncio.create_task(ask(frontend, spec(source)))
            await asyncio.wait({call}, timeout=0.02)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert frontend.stats()["held_bytes"] == held and frontend.live == 2
        decoder.go_on.set()
        await asyncio.gather(*others)
        assert decoder.decoded == [b"slow"]
        await ask(frontend, spec(Video(b"after", "v"), image(b"after"), image(b"after"), name="after"))

    with_frontend(assets, body)


class Keeper(FakeEngine):
    """An engine that takes requests and keeps weak references to their pixels."""

    def __init__(self) -> None:
        super().__init__(vocabulary=64)
        self.pixels: list[weakref.ref[torch.Tensor]] = []
        self.gone = threading.Semaphore(0)
        """Released for each tensor that is freed."""

    def submit(self, request: EngineRequest) -> None:
        self.pixels += [
            weakref.ref(image.encoder_item.patches, lambda _: self.gone.release()) for image in request.images
        ]
        if request.embed is None:
            super().submit(replace(request, images=()))
        else:
            self._emit([EngineEvent(request.request_id, finish_reason="length", embedded=(b"", b""))])


@contextmanager
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_pixels_do_not_live_for_as_long_as_their_answer(assets: ModelAssets) -> None:
    engine = Keeper()

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        decoder.go_on.set()
        seen = []
        async for event in frontend.stream(spec(image(), Video(b"", "v"), sampling={"max_tokens": 3})):
            seen.append(event)
            assert len(engine.pixels) == 2
            while any(pixels() is not None for pixels in engine.pixels):  # a thread may be about to release them
                assert await asyncio.to_thread(engine.gone.acquire, timeout=60)
        assert isinstance(seen[-1], Finished) and seen[-1].usage.image_tokens > 0 < seen[-1].usage.video_tokens

    with without_collections():
        with_frontend(assets, body, engine=engine, limits=FrontendLimits(prepared_cache_bytes=0))


def test_room_for_pixels_is_given_back_with_the_first_tokens(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, decoder: Controlled) -> None:
        decoder.go_on.set()
        held = [
            (type(event), frontend.stats()["held_bytes"] > 0)
            async for event in frontend.stream(spec(image(), sampling={"max_tokens": 3}))
        ]
        assert held[0][1] and not held[-1][1] and not any(more for kind, more in held if kind is Delta)

    with_frontend(assets, body)


def test_what_decodes_a_video_is_free_at_once_when_it_is_refused(assets: ModelAssets) -> None:
    """With frames of two sizes the error is raised after decoding, in the middle of the clip."""

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        decoder.go_on.set()
        decoder.of_clip = [GREY, GREY[:16], GREY]
        with pytest.raises(errors.InvalidArgument, match="frame 1 has 16x32 pixels") as refused:
            await ask(frontend, spec(Video(b"", "v")))
        assert decoder.borrowed == 0, refused

    with without_collections():
        with_frontend(assets, body)


# -- who waits for whom ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_long_videos_leave_room_for_images(assets: ModelAssets, workers: int) -> None:
    async def body(frontend: Frontend, decoder: Controlled) -> None:
        videos = [asyncio.create_task(ask(frontend, spec(Video(b"", "v"), name=f"v{i}"))) for i in range(4)]
        await begun(decoder, max(1, workers - 1))
        assert await ask(frontend, spec(image(b"quick")))
        assert not decoder.begun.acquire(blocking=False), "no more videos at a time than leave a process free"
        decoder.go_on.set()
        await asyncio.gather(*videos)

    with_frontend(assets, body, workers=workers)


# -- size --------------------------------------------------------------------------------------------------------------


def sizes(assets: ModelAssets, max_len: int) -> list[tuple[Any, dict[str, Any], str]]:
    assert assets.tokenizer is not None
    room = max_len - 1  # beside one token of the answer
    most = room * assets.tokenizer.longest
    empty = Message("user", ())
    return [
        (ChatInput((empty,) * (room + 1)), {}, f"{room + 1} messages; .* of {max_len} tokens holds at most {room}"),
        (ChatInput((Message("user", ("",) * (room + 1)),)), {}, f"{room + 1} parts"),
        (ChatInput((Message("user", ("a" * (most + 1),)),)), {}, f"{most + 1} characters"),
        (RawInput("a" * (most + 1)), {}, f"{most + 1} characters"),
        (TokensInput((7,) * (room + 1)), {}, f"{room + 1} tokens; .* of {max_len} tokens holds at most {room} besides"),
        (RawInput("a"), {"continued": (7,) * room}, f"{room} tokens; .* at most {room - 1} besides the prompt and the"),
    ]


@pytest.mark.parametrize("case", range(6))
def test_what_no_context_holds_is_refused_by_its_count(assets: ModelAssets, case: int) -> None:
    """Rejected before images of the same request are decoded."""
    engine = FakeEngine(vocabulary=64, max_len=50)
    given, fields, words = sizes(assets, 50)[case]

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        with pytest.raises(errors.InvalidArgument, match=words) as refused:
            await ask(frontend, spec(image(b"bad"), input=given, **fields))
        assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert int(refused.value.metadata["got"]) == int(refused.value.metadata["limit"]) + 1

    with_frontend(assets, body, engine=engine)


def test_what_just_fits_is_not_refused_by_its_count(assets: ModelAssets) -> None:
    from service.answers.bounds import check_size

    assert assets.tokenizer is not None
    for given in (
        ChatInput((Message("user", ()),) * 49), RawInput("a" * 49 * assets.tokenizer.longest), TokensInput((7,) * 49)
    ):  # fmt: skip
        check_size(spec(input=given, continued=(1,) * 48), FrontendLimits(), 50, assets.tokenizer.longest)
    videos = (Video(b"", "v"), Video(b"", "v"))
    check_size(spec(*videos, input=TokensInput((7,) * (49 + 64))), FrontendLimits(), 50, 1)
    check_size(GenerateSpec("", "", ImageInput()), FrontendLimits(), 50, 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": TokensInput((7, 2**32 - 1))}, "tokens.ids"),
        ({"continued": (2**32 - 1,)}, "continued_token_ids"),
        ({"sampling": {"logit_bias": {2**32 - 1: 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(10**5), 1.0)}}, "sampling.logit_bias"),
        ({"sampling": {"stop_token_ids": frozenset({2**32 - 1})}}, "sampling.stop_token_ids"),
    ],
)  # fmt: skip
def test_ids_that_the_model_does_not_have(assets: ModelAssets, fields: dict[str, Any], field: str) -> None:
    words = f"is not below the vocabulary size of {assets.config.decoder.vocab_size}"

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        with pytest.raises(errors.InvalidArgument, match=words) as refused:
            await ask(frontend, spec(**fields))
        assert refused.value.field == field

    with_frontend(assets, body)


@pytest.mark.parametrize(("size", "apart"), [(10, False), (3000, True)])
def test_long_definitions_of_tools_are_rendered_off_the_event_loop(assets: ModelAssets, size: int, apart: bool) -> None:
    """Also if the messages are short: templates print the definitions."""
    where: list[int] = []

    class Probing(ChatTemplate):
        def render(
            self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None, **options: Any
        ) -> str:
            where.append(threading.get_ident())
            return super().render(messages, arguments, **options)

    probing = copy.copy(assets)
    probing.template = Probing("{{ tools | tojson }}{{ messages[0].content }}", image_token=None, special_tokens={})
    told = {"tools": [{"name": "f", "words": "a" * size}]}
    asked = GenerateSpec("r", "", ChatInput((Message("user", ("hi",)),), told))

    async def body(frontend: Frontend, decoder: Controlled) -> None:
        await frontend.tokenize(asked)
        assert ({threading.get_ident()} != set(where)) == apart

    with_frontend(probing, body)


@pytest.mark.parametrize("kind", [Image, Video])
def test_tenants_take_turns_with_their_images_and_videos(kind: Callable[[bytes, str], MediaSource]) -> None:
    done, first, go_on = list[str](), threading.Event(), threading.Event()

    def prepare(source: MediaSource) -> None:
        first.set()
        assert go_on.wait(30)
        done.append(source.field)

    async def run() -> None:
        threads = MediaThreads(1)
        requests = [(["a1"], b"a"), (["a2", "a3", "a4"], b"a"), (["b1", "b2"], b"b"), (["c1"], b"c")]
        jobs = []
        for names, tenant in requests:
            sources = [kind(b"", name) for name in names]
            jobs.append(asyncio.create_task(threads.map(prepare, sources, tenant)))
            for _ in range(5):  # all of its sources ask for a place
                await asyncio.sleep(0)
            await asyncio.to_thread(first.wait)
        go_on.set()
        await asyncio.gather(*jobs)
        threads.close()

    asyncio.run(run())
    assert done == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
