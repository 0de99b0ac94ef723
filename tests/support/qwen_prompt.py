"""A Qwen3.5 directory without weights, with a small tokenizer and a chat template; and transformers' processor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from published_qwen import published
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
"""Added tokens that are text, not special."""
CORPUS = (
    "what is in the image? describe the video at 1.5 seconds. <0.5 seconds><12.0 seconds> you are a helpful assistant",
    '# Tools {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}',
    "Straße, naïve café, 写真は何ですか, 사진, фото, 1234567890\n\n  indented\r\n",
)
TEMPLATE = r"""
{%- macro render(content, system=false) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for item in content -%}
            {%- if item.type == 'image' or item.type == 'video' -%}
                {%- if system -%}{{- raise_exception('System messages hold no media.') -}}{%- endif -%}
                {{- '<|vision_start|><|' + item.type + '_pad|><|vision_end|>' -}}
            {%- elif 'text' in item -%}
                {{- item.text -}}
            {%- else -%}
                {{- raise_exception('Unexpected content.') -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set first = messages[0].role == 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>' }}
    {%- if first %}{{- '\n\n' + render(messages[0].content, true).strip() }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- elif first %}
    {{- '<|im_start|>system\n' + render(messages[0].content, true).strip() + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if ns.last < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {%- set content = render(message.content, message.role == 'system').strip() %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- elif not loop.first %}
        {{- raise_exception('System message must come first.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
"""A template with the structure of released ones: media in turns, tools as JSON, reasoning of earlier turns left
out."""


def write_prompting(path: Path) -> Qwen3_5Tokenizer:
    """Writes configuration, tokenizer and template; returns transformers' tokenizer."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet()))
    model = json.loads(trained.to_str())["model"]
    tokenizer = Qwen3_5Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens(list(ADDED))
    tokenizer.chat_template = TEMPLATE
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    config = published("0.8B")
    for name, token in zip(("vision_start", "vision_end", "image", "video"), SPECIAL[3:], strict=True):
        config[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(token)
    (path / "config.json").write_text(json.dumps(config))
    return tokenizer


def processor(tokenizer: Qwen3_5Tokenizer, *, merge_size: int = 2, temporal_patch_size: int = 2) -> Any:
    """transformers' own processor, built without its constructor, whose video processor needs torchvision."""
    made: Any = object.__new__(Qwen3VLProcessor)
    made.tokenizer = tokenizer
    made.image_token, made.video_token = "<|image_pad|>", "<|video_pad|>"
    made.vision_start_token, made.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    made.image_processor = SimpleNamespace(merge_size=merge_size)
    made.video_processor = SimpleNamespace(merge_size=merge_size, temporal_patch_size=temporal_patch_size)
    return made


def processor_ids(
    made: Any, text: str, images: Sequence[tuple[int, int]], clips: Sequence[Mapping[str, Any]]
) -> list[int]:
    """The processor's token ids for a rendered template. `images`: grids of patches; `clips`: `grid` (t, h, w), `fps`,
    and `indices` of the frames."""
    grids = torch.tensor([(1, *grid) for grid in images]).reshape(-1, 3)
    videos = torch.tensor([clip["grid"] for clip in clips]).reshape(-1, 3)
    told = [SimpleNamespace(fps=clip["fps"], frames_indices=list(clip["indices"])) for clip in clips]
    stills = [made.replace_image_token({"image_grid_thw": grids}, index) for index in range(len(images))]
    films = [
        made.replace_video_token({"video_grid_thw": videos, "video_metadata": told}, index)
        for index in range(len(clips))
    ]  # fmt: skip
    [whole], _ = made.get_text_with_replacements([text], stills, films)
    return [int(token) for token in made.tokenizer(whole)["input_ids"]]
