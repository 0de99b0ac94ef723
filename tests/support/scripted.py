"""Answers whose tokens are given: a frontend over an engine that sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fake_engine import FakeEngine

from service.answers.bounds import FrontendLimits
from service.answers.coalesce import coalesce
from service.answers.frontend import Frontend
from service.common.types import Delta, Event, GenerateSpec, RawInput
from service.engine.types import EngineEvent, EngineRequest
from service.media.patches import local_processor
from service.model.assets import ModelAssets

END = 4


class Scripted(FakeEngine):
    """Sends fixed tokens as the only sample of each request, one per event, after those that it is given. `end`: the
    token that ends an answer."""

    def __init__(self, tokens: Sequence[int], end: int = END) -> None:
        super().__init__(vocabulary=1024, max_len=1000)
        self.tokens, self.requests, self.end = list(tokens), list[EngineRequest](), end

    def submit(self, request: EngineRequest) -> None:
        self.requests.append(request)
        left = self.tokens[len(request.output_ids) :]
        for name in request.names:
            events = [EngineEvent(name, token) for token in left[:-1]]
            last = EngineEvent(name, left[-1], finish_reason="length")
            if left[-1] == self.end:
                last = last._replace(finish_reason="stop", stop_token=self.end)
            for event in [*events, last]:
                self._emit([event])

    def abort(self, request_id: str) -> None:
        pass


def ids(assets: ModelAssets, text: str) -> list[int]:
    assert assets.tokenizer is not None
    return assets.tokenizer.encode(text)


def answered(
    assets: ModelAssets,
    output: str | Sequence[int],
    prompt: str = "a<think>\n",
    *,
    chunk: int | None = None,
    end: int = END,
    **fields: Any,
) -> tuple[list[Event], list[EngineRequest]]:  # fmt: skip
    """The events of an answer to a raw prompt, with the tokens of the text `output`, or these token ids. `end`: see
    `Scripted`."""

    async def run() -> tuple[list[Event], list[EngineRequest]]:
        engine = Scripted(ids(assets, output) if isinstance(output, str) else output, end)
        processor = local_processor(FrontendLimits().media, assets.vision, "float32")
        frontend = Frontend(engine, assets, FrontendLimits(), processor=processor)
        frontend.start()
        given: dict[str, Any] = {"input": RawInput(prompt), "sampling": {"max_tokens": 200}, **fields}
        try:
            events = frontend.stream(GenerateSpec("r", "", **given))
            if chunk is not None:
                events = coalesce(events, chunk_tokens=chunk, max_delay=None)
            async with asyncio.timeout(60):
                return [event async for event in events], engine.requests
        finally:
            await asyncio.to_thread(frontend.close)

    return asyncio.run(run())


def split(events: list[Event]) -> tuple[str, str]:
    deltas = [event for event in events if isinstance(event, Delta)]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.text for delta in deltas)
