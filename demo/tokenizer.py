"""Tokenizer and chat template of the demo model.

The tokenizer is a byte-level BPE trained on the world's own sentences (`demo.data.sentences`) and on the English
below, so that each common word is one token, each decimal digit is one token, and any UTF-8 text round-trips.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 1024
RESERVED = 80
"""Number of ids that are reserved for the tokens that `extended` adds."""

SPECIAL_TOKENS = (
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<image>", "<img>", "</img>",
)  # fmt: skip
PAD_ID, BOS_ID, EOS_ID, IMAGE_ID = (SPECIAL_TOKENS.index(t) for t in ("<pad>", "<s>", "<|im_end|>", "<image>"))

TOOL_TOKENS = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>",
    "<tool_response>", "</tool_response>", "<tools>", "</tools>", "<function>", "<name>", "</name>", "<description>",
    "</description>", "<parameters>", "</parameters>", "<parameter>", "<type>", "</type>",
)  # fmt: skip
"""Tags of the tool markup. They are not special tokens, just as `<think>` is not: the detokenizer includes them."""
MORE_WORDS = (
    '{"', '":', '",', ' "', '"}', '},', ' {"', '[{"', '}]', '"]', ' [', ' ["', ' [{"', " JSON", " keys", " object",
    " array", "shape", "color", "place", "count", "number", " tool",
)  # fmt: skip
"""Frequent parts of JSON and of requests for it, one token each."""

CHAT_TEMPLATE = """\
{#- ChatML; tools and their calls in the markup of Nemotron 3. `enable_thinking` is accepted and changes nothing: this
model answers at once. -#}
{%- macro text_of(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content -%}
{%- for part in content -%}
{%- if part['type'] == 'image' -%}
{{- '<img><image></img>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- else -%}
{{- raise_exception('content parts are text or image, not ' + part['type']) -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set rest = messages -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages and messages[0]['role'] == 'system' -%}
{%- set rest = messages[1:] -%}
{{- text_of(messages[0]['content']) + '\\n\\n' -}}
{%- endif -%}
{{- '# Tools\\n\\n<tools>' -}}
{%- for tool in tools -%}
{%- set tool = tool['function'] if tool['function'] else tool -%}
{{- '\\n<function>\\n<name>' + tool['name'] + '</name>' -}}
{%- if tool['description'] -%}
{{- '\\n<description>' + tool['description'] | trim + '</description>' -}}
{%- endif -%}
{{- '\\n<parameters>' -}}
{%- for name, field in (((tool['parameters'] or {})['properties']) or {}) | items -%}
{{- '\\n<parameter>\\n<name>' + name + '</name>' -}}
{%- if field is mapping and field['type'] -%}
{{- '\\n<type>' + field['type'] | string + '</type>' -}}
{%- endif -%}
{%- if field is mapping and field['description'] -%}
{{- '\\n<description>' + field['description'] | trim + '</description>' -}}
{%- endif -%}
{%- if field is mapping and field['enum'] -%}
{{- '\\n<enum>' + field['enum'] | tojson + '</enum>' -}}
{%- endif -%}
{{- '\\n</parameter>' -}}
{%- endfor -%}
{{- '\\n</parameters>\\n</function>' -}}
{%- endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in rest -%}
{%- if message['role'] == 'tool' -%}
{{- '\\n' if loop.previtem and loop.previtem['role'] == 'tool' else '<|im_start|>user\\n' -}}
{{- '<tool_response>\\n' + text_of(message['content']) + '\\n</tool_response>' -}}
{{- '' if loop.nextitem and loop.nextitem['role'] == 'tool' else '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + text_of(message['content']) -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set call = call['function'] if call['function'] else call -%}
{{- '\\n' if message['content'] or not loop.first else '' -}}
{{- '<tool_call>\\n<function=' + call['name'] + '>\\n' -}}
{%- for name, value in (call['arguments'] or {}) | items -%}
{{- '<parameter=' + name + '>\\n' -}}
{{- value if value is string else value | tojson -}}
{{- '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

ENGLISH = """\
The people of the town have lived by the river for as long as anyone can remember. In the morning they open the
windows, make bread, and talk about the weather. Some of them work in the fields and some of them work with their
hands. It is not easy to say which of the two is better. When the sun is high the children go to school, where they
learn to read, to write and to count. A good teacher will show them a picture and ask what they can see in it. Is it
a house or a tree? Which one is larger, and how do you know? They answer in their own words, and they are often
right. After that they draw what they like: a small boat, a black dog, a white bird, an old man with a hat, a woman
who reads a book under a lamp. You should know that this is a very small model. It can only tell you about simple
pictures, and it does not know much about the world. If you would like to try it, please show it a picture and ask a
question about it. Could there be more than one thing? Then it will tell you what each of them is, where it is, and
which colour it has. Thank you for your help. What would you do with a little more time? I think that we could make
it better, but first of all it should be right every time. Water, light, air and stone were here before us, and they
will be here after us. Through the years many things have changed. The new road goes from the station to the park,
over the bridge and along the wall. Because it rains so much in the spring, no one who lives there goes out without
a coat. We have been waiting for a long time, they said, and now it is our turn. Please give me the name of the
number that comes between six and eight. He was never late; she had always been early. These are the days that we
will talk about when we are old. Do not look at the clock, look at the sky. Yes, no, maybe, often, always, never.
Hello! Good morning, good evening and good night. How are you today? I am well, thank you. What is your name? Who
made you? zero one two three four five six seven eight nine ten eleven twelve first second third last next left
right above below Describe, explain, compare, list, name, find, read, write, count, show, tell, say, give, answer,
choose, look, see, think.
""".splitlines()


def train_tokenizer(sentences: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `VOCAB_SIZE` entries; the special tokens take ids 0 to 9."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - RESERVED,
        special_tokens=[AddedToken(t, special=not t.endswith("think>"), normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*sentences, *ENGLISH * 4], trainer)
    return extended(tokenizer)


def extended(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` with `MORE_WORDS` and `TOOL_TOKENS`; unchanged if it has them already. Existing ids and the tokens of
    other text stay the same, because the new merges come last."""
    for word in MORE_WORDS:
        while len(parts := tokenizer.encode(word, add_special_tokens=False).tokens) > 1:
            state = json.loads(tokenizer.to_str())
            state["model"]["vocab"].setdefault(parts[-2] + parts[-1], tokenizer.get_vocab_size())
            state["model"]["merges"].append([parts[-2], parts[-1]])
            tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TOOL_TOKENS])
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """The contents of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 4096,
    }


def render_user(parts: Sequence[str | None]) -> str:
    """One user message and the assistant's opening, as the chat template renders them; `None` is a picture."""
    content = "".join("<img><image></img>" if part is None else part for part in parts)
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def render_system(text: str) -> str:
    """A system message as the chat template renders it."""
    return f"<|im_start|>system\n{text}<|im_end|>\n"


def render_tools(tools: Sequence[Mapping[str, Any]], system: str = "") -> str:
    """A system message with `tools` (OpenAI's functions) as the chat template renders it."""
    lines = [f"{system}\n" if system else "", "# Tools\n", "<tools>"]
    for tool in tools:
        lines += ["<function>", f"<name>{tool['name']}</name>"]
        lines += [f"<description>{tool['description']}</description>"] if "description" in tool else []
        lines.append("<parameters>")
        for name, field in tool["parameters"]["properties"].items():
            lines += ["<parameter>", f"<name>{name}</name>", f"<type>{field['type']}</type>"]
            lines += [f"<description>{field['description']}</description>"] if "description" in field else []
            lines += [f"<enum>{json.dumps(field['enum'])}</enum>"] if "enum" in field else []
            lines.append("</parameter>")
        lines += ["</parameters>", "</function>"]
    return render_system("\n".join([*lines[not system :], "</tools>"]))


def render_call(name: str, arguments: Mapping[str, str]) -> str:
    """A call of a tool as the chat template renders it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def render_response(responses: Sequence[str]) -> str:
    """The content of a user's message with the results of calls as the chat template renders it."""
    return "\n".join(f"<tool_response>\n{response}\n</tool_response>" for response in responses)
