# Generated from saccade/_async/methods.py by `make sdk`. Do not edit.
"""The methods that all clients share."""

from __future__ import annotations

import os
from collections.abc import (
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import closing
from typing import TYPE_CHECKING, Any

from saccade._core.formats import ResponseFormat, parsed_answer
from saccade._core.images import ImageInput
from saccade._core.methods import (
    answer_steps,
    embed_image_steps,
    embed_steps,
    generate_steps,
    get_model_steps,
    models_steps,
    tokenize_steps,
)
from saccade._core.requests import (
    GenerateOptions,
    Prompt,
    Sampling,
    build_request,
    chat_messages,
    embed_image_request,
    embed_request,
    tokenize_request,
)
from saccade._core.resuming import stream_settings
from saccade._core.videos import VideoInput
from saccade._map.threads import map_requests
from saccade._map.window import MapRequest, check_concurrency, outcome, prepare_mapping
from saccade._sync.ports import Exchange
from saccade._sync.session import Session
from saccade._sync.stream import Stream
from saccade.types import ChatMessage, Embedding, Generation, Model, Outcome, Tensor, Tokens
from saccade.v1 import inference_pb2

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from saccade._jobs.job import BatchKeywords, BatchSummary


class Methods(Session):
    """`generate` and the other methods, for any kind of connection."""

    def generate(
        self,
        prompt: Prompt,
        *,
        images: Iterable[ImageInput] | ImageInput = (),
        videos: Iterable[VideoInput] | VideoInput = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        raw: bool = False,
        timeout: float | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Sends a request and waits for the complete answer.

        Args:
            prompt: a string, which the model's chat template turns into a user message (unless `raw=True`); or a list
                of chat messages `{"role": ..., "content": ...}`, whose content is a string or a list of parts
                `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`; or a list of token ids, which is
                used without changes, with one image token id for each image.
            images: paths, URLs, encoded bytes, binary files, Pillow images or uint8 arrays `[height, width, channels]`
                or `[height, width]`. With a string they come before the text; with chat messages they fill the image
                parts that have no image, in order.
            videos: paths, URLs or bytes of GIF, APNG, WebP, AVIF, MP4 or WebM files, lists of frames (each as in
                `images`), or `saccade.Video`, which also has the frame rate. They come after the images.
            max_tokens: maximum number of tokens of the answer; None: as many as the model's context has left.
            temperature: 0 always takes the most likely token; None: the model's default.
            top_p: draw from the most likely tokens whose probabilities add up to this; None: the model's default.
            top_k: draw from this number of most likely tokens; 0 or -1: from all; None: the model's default.
            seed: from 0 to 2**64 - 1; the same seed gives the same answer. None: the server draws one and returns it.
            stop: strings that end the answer; they are not part of it.
            logprobs: k, from 0 to 100: also return the log-probability of each token and the k most likely tokens.
            raw: use a string prompt as it is: without the chat template, and without a beginning-of-sequence token.
            timeout: seconds for the whole call, retries included; None: the client's timeout.
            chat_template_kwargs: further arguments of the chat template.
            sampling: min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, min_tokens,
                stop_token_ids, ignore_eos, n, continued_token_ids, model, request_id, priority; clamp_max_tokens, with
                which a max_tokens that the context does not hold is reduced, not an error; allowed_token_ids,
                bad_words; response_format, the required format of the text: a JSON schema, a Pydantic model class,
                `saccade.Regex`, `saccade.Lark`, `saccade.StructuralTags`, a list of choices or "json_object".
                For models that reason before they answer: enable_thinking, reasoning_effort, max_reasoning_tokens.
                tools: `saccade.Tool`s or dicts in OpenAI's form, which the model may call (`Generation.tool_calls`);
                tool_choice: "auto", "none", "required" or a tool's name; parallel_tool_calls.
                continue_final_message: the answer continues the text of the last chat message, which is the
                assistant's, and does not repeat it. late_system_as_user: system messages after others become the
                user's if the chat template rejects them.
                skip_special_tokens: False: the text has the names of special tokens, such as markers of boxes.
                return_prompt_token_ids: the answer has the token ids of the prompt (`Generation.prompt_token_ids`).

        Raises:
            SaccadeError: one of its subclasses, see `saccade.errors`.
        """

        def build() -> inference_pb2.GenerateRequest:
            return build_request(
                prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
                max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop,
                logprobs=logprobs, **sampling,
            )  # fmt: skip

        return self._run(generate_steps(build, self._calls.upload_above), timeout)

    def stream(
        self,
        prompt: Prompt,
        *,
        images: Iterable[ImageInput] | ImageInput = (),
        videos: Iterable[VideoInput] | VideoInput = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        raw: bool = False,
        timeout: float | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        first_token_timeout: float | None = None,
        idle_timeout: float | None = None,
        resume: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Stream:
        """Sends a request and returns an iterator over the parts of the answer. Arguments and errors are those of
        `generate`; an error of the server is raised while the stream is read.

        Args:
            first_token_timeout: seconds to wait for the first part of the answer before DeadlineExceeded is raised,
                with the reason FIRST_TOKEN_TIMEOUT; None: the client's setting.
            idle_timeout: the same for each further part, with the reason IDLE_TIMEOUT.
            resume: continue a stream that broke because the server or its engine failed; see `Stream`.
        """

        def build() -> inference_pb2.GenerateRequest:
            return build_request(
                prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
                max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop,
                logprobs=logprobs, **sampling,
            )  # fmt: skip

        calls = stream_settings(self._calls, first_token_timeout, idle_timeout)
        stream = Stream(self, build, calls, timeout, resume)
        return stream._opened()

    def parse(self, prompt: Prompt, *, response_format: ResponseFormat, **options: Any) -> Any:
        """As `generate`, but returns the answer as an object: an instance of a Pydantic model class, parsed JSON for a
        JSON schema, the text for other formats.

        Args:
            response_format: as in `generate`.
            options: further arguments of `generate`, except `n`.

        Raises:
            OutOfRange: the answer was cut off before its format was complete (reason ANSWER_TRUNCATED), usually by
                `max_tokens`.
        """
        answer = self.generate(prompt, response_format=response_format, **options)
        return parsed_answer(answer, response_format)

    def chat(
        self,
        messages: str | Sequence[ChatMessage] | Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Sends a conversation and returns the next message; `messages.append(answer.message)` continues it.

        Args:
            messages: chat messages as `generate` takes them; a string is one message of the user.
            system: a system message, which is put before the others.
            options: further arguments of `generate`.
        """
        return self.generate(chat_messages(messages, system), **options)

    def embed(
        self,
        prompt: Prompt,
        *,
        images: Iterable[ImageInput] | ImageInput = (),
        videos: Iterable[VideoInput] | VideoInput = (),
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model: str = "",
        priority: int | None = None,
        timeout: float | None = None,
    ) -> Embedding:
        """The decoder's hidden states for a prompt, with the arguments of `generate`.

        The model was trained to generate text and not to compare texts, so prompts with the same meaning may have very
        different states. `last` is the state from which the first token of an answer would be computed.
        """

        def build() -> inference_pb2.EmbedRequest:
            return embed_request(
                prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
                model=model, priority=priority,
            )  # fmt: skip

        return self._run(embed_steps(build, self._calls.upload_above), timeout)

    def embed_image(self, image: ImageInput, *, model: str = "", timeout: float | None = None) -> Tensor:
        """The embeddings of an image, float32 `[image tokens, hidden size]`: output of the projector, input of the
        decoder."""
        steps = embed_image_steps(lambda: embed_image_request(image, model=model), self._calls.upload_above)
        return self._run(steps, timeout)

    def tokenize(
        self,
        prompt: Prompt,
        *,
        images: Iterable[ImageInput] | ImageInput = (),
        videos: Iterable[VideoInput] | VideoInput = (),
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        late_system_as_user: bool = False,
        model: str = "",
        timeout: float | None = None,
    ) -> Tokens:
        """The token ids that `generate` would use for a prompt, and its number of tokens, images included."""

        def build() -> inference_pb2.TokenizeRequest:
            return tokenize_request(
                prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
                continue_final_message=continue_final_message, late_system_as_user=late_system_as_user, model=model,
            )  # fmt: skip

        return self._run(tokenize_steps(build, self._calls.upload_above), timeout)

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """The models that are served."""
        return self._run(models_steps(), timeout)

    def get_model(self, name: str = "", *, timeout: float | None = None) -> Model:
        """A served model and its limits; without a name, the server's only model.

        Raises:
            NotFound: the server has no model of this name.
        """
        return self._run(get_model_steps(name), timeout)

    def map(
        self,
        requests: Iterable[MapRequest],
        *,
        concurrency: int = 32,
        ordered: bool = False,
    ) -> Generator[Outcome, None, None]:
        """Answers many requests, up to `concurrency` at a time. The memory needed does not grow with their number.

        Args:
            requests: mappings with the arguments of `generate` and, optionally, a `custom_id`. The next one is read
                when fewer than `concurrency` are in flight, in a separate thread, so a slow source delays no running
                request.
            ordered: yield outcomes in the order of the requests, so that a slow request delays those after it; by
                default they are yielded as they arrive.

        Returns:
            An iterator of outcomes. A request that failed is an outcome with an error, not an exception. Closing the
            iterator cancels the requests in flight.
        """
        check_concurrency(concurrency)
        return self._map(requests, concurrency, ordered)

    def _map(
        self,
        requests: Iterable[MapRequest],
        concurrency: int,
        ordered: bool,
    ) -> Generator[Outcome, None, None]:
        with closing(
            map_requests(self, requests, prepare_mapping, concurrency=concurrency, ordered=ordered)
        ) as results:
            for index, request, result in results:
                yield outcome(index, request, result)

    def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        timeout: float | None,
        exchange: Exchange | None = None,
    ) -> inference_pb2.GenerateResponse:
        return self._run(answer_steps(request, self._calls.upload_above), timeout, exchange)

    def run_batch(
        self,
        source: str | os.PathLike[str],
        output: str | os.PathLike[str],
        *,
        max_retries: int | None = 8,
        **options: Unpack[BatchKeywords],
    ) -> BatchSummary:
        """Answers a file of requests in OpenAI's batch format, and writes the answers to another file; see
        `saccade batch`.

        The whole file is checked before the first request is sent. If a run is interrupted in any way, it continues
        when it is started again with the same arguments. A row that fails is an error row of the output, not an
        exception; so is a row with an image that cannot be read, unless `strict=True`.

        Args:
            source: path of a JSONL file. Images may be named by paths inside its folder.
            output: path of a JSONL file; answers that an interrupted run has written to it are kept.
            max_retries: number of retries of a row while the server is unavailable; None: as many as its timeout
                allows.
            options: concurrency, ordered, max_errors, overwrite, any_model, strict and timeout, as for `saccade batch`;
                priority (default: -10); on_progress and on_start, functions that are called with the counts so far
                after each row (with the row's completion tokens and whether it failed) and before the first.

        Raises:
            InvalidArgument: the source cannot be read, or has invalid lines: the error's `problems` then has a sentence
                for each of the first 20.
            AlreadyExists: the output exists and has other content than answers to this source by this model.
            FailedPrecondition: the output cannot be written, another process is writing it, or more than `max_errors`
                rows have failed.
            Unavailable: the server no longer answers; start again to continue.
        """
        from saccade._jobs.job import BatchJob, BatchOptions
        from saccade._sync.jobs import run_job

        job = BatchJob(source, output, BatchOptions.of(options))
        return run_job(self.with_options(max_retries=max_retries), job)
