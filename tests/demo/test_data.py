"""The demo model's data: determinism, the held-out part, and agreement of training text with the chat template."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from demo import data, drawing, world
from demo.tokenizer import CHAT_TEMPLATE, EOS_ID, IMAGE_ID, PAD_ID, render_system, render_user, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(data.sentences(400))


def _pixels(example: world.Example) -> list[bytes]:
    return [np.asarray(picture.image).tobytes() for picture in example.pictures]


@pytest.mark.parametrize("kind", world.KINDS)
def test_a_question_is_the_same_each_time(kind: str) -> None:
    first, again, other = (data.question_example(seed, kind) for seed in (3, 3, 4))
    assert first.turns == again.turns
    assert _pixels(first) == _pixels(again) != _pixels(other)


@pytest.mark.parametrize("kind", world.KINDS)
def test_questions_vary_in_wording_form_and_answer(kind: str) -> None:
    turns = [data.question_example(seed, kind).turns[0] for seed in range(200)]
    assert {turn.kind for turn in turns} == {kind}
    assert len({turn.question for turn in turns}) >= 8
    sentences = [turn for turn in turns if "sentence" in turn.question]
    assert 30 < len(sentences) < 120
    for turn in turns:
        assert turn.answer.endswith(".") == ("sentence" in turn.question), turn
    assert max(Counter(turn.answer for turn in turns).values()) < 100


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_training_never_shows_what_is_held_out(seed: int) -> None:
    rng = random.Random(seed)
    examples = [data.scene_example(rng, 3), data.scene_example(rng, 1, kind="caption"), data.pair_example(rng, 3)]
    pictures = [drawing.practice_sheet(rng, data.any_size(rng)), *(p for e in examples for p in e.pictures)]
    assert not any(thing.novel for picture in pictures for thing in picture.things)
    assert not any(turn.novel for example in examples for turn in example.turns)


def test_a_fifth_of_the_combinations_is_novel_but_no_part_of_one() -> None:
    everything = set(itertools.product(world.COLOURS, world.SHAPES, world.PLACES))
    assert len(everything) * 0.19 < len(world.NOVEL) < len(everything) * 0.21
    seen = everything - world.NOVEL
    assert {(c, s) for c, s, _ in seen} == {(c, s) for c, s, _ in everything}
    assert {(c, p) for c, _, p in seen} == {(c, p) for c, _, p in everything}
    assert {(s, p) for _, s, p in seen} == {(s, p) for _, s, p in everything}


def test_held_out_questions_include_novel_combinations() -> None:
    for kind in world.SCENE_KINDS:
        novel = sum(data.question_example(seed, kind).turns[0].novel for seed in range(100))
        assert 5 < novel < 60, kind


def test_handwritten_digits_are_split() -> None:
    rng = random.Random(0)
    train = {drawing.digit_index(rng, held_out=False) for _ in range(3000)}
    held_out = {drawing.digit_index(rng, held_out=True) for _ in range(3000)}
    assert max(train) < 1500 <= min(held_out)
    assert len(held_out) == world.HELD_OUT_DIGITS


def test_images_have_legal_sizes_and_boxes_inside() -> None:
    rng = random.Random(5)
    for example in (data.scene_example(rng, 1), data.glyph_example(rng), data.pair_example(rng, 1)):
        for picture in example.pictures:
            assert all(world.MIN_SIDE <= side <= world.MAX_SIDE for side in picture.image.size)
            for thing in picture.things:
                x, y = (thing.box[0] + thing.box[2]) / 2, (thing.box[1] + thing.box[3]) / 2
                assert 0 < x < picture.image.width and 0 < y < picture.image.height


@pytest.mark.parametrize(
    "text",
    [
        "What colour is the circle?",
        "  two  spaces\nand\ta tab",
        "Zoë naïve Ελλάδα 漢字 🙂",
        "1234 + 5 = 1239",
        "\x00\x7f",
        "",
    ],
    ids=["plain", "blanks", "unicode", "digits", "control", "empty"],
)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_words_of_the_world_and_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    for word in (*world.COLOURS, *world.SHAPES, "picture", "second"):
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1, word
    assert len(tokenizer.encode("4071", add_special_tokens=False).ids) == 4
    assert [tokenizer.token_to_id(t) for t in ("<pad>", "<|im_end|>", "<image>")] == [PAD_ID, EOS_ID, IMAGE_ID]


def _render(messages: list[dict[str, object]], **arguments: object) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(CHAT_TEMPLATE).render(messages=messages, **arguments)


def test_training_renders_what_the_template_renders() -> None:
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which picture has more shapes?"}]
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "the first"},
        {"role": "user", "content": "How many circles are there?"},
    ]
    expected = (
        render_system("Be brief.")
        + render_user([None, None, "Which picture has more shapes?"])
        + "the first<|im_end|>\n"
        + render_user(["How many circles are there?"])
    )
    assert _render(messages, add_generation_prompt=True) == expected
    assert _render(messages, add_generation_prompt=True, enable_thinking=True) == expected
    assert expected == _render(messages) + "<|im_start|>assistant\n"
    assert render_user([None, "?"]) == ("<|im_start|>user\n<img><image></img>?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("kind", world.KINDS)
def test_each_part_of_an_answer_is_about_something_in_the_images(kind: str) -> None:
    for seed in range(40):
        example = data.question_example(seed, kind)
        turn = example.turns[0]
        shown = [thing for picture in example.pictures for thing in picture.things]
        assert all(any(thing is other for other in shown) for thing in turn.about)
        for start, end, things in turn.focus():
            assert 0 <= start < end <= len(turn.answer)
            if turn.one_by_one:
                assert things[0].glyph in turn.answer[start:end]
