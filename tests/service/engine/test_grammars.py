"""Formats as constraints: what they allow with the vocabulary of the embedded model and with random choices."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jsonschema
import pytest
from grammar_walks import END, TOKENIZER, VOCABULARY, allowed, walk
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as RawTokenizer

from benchmarks.schemas import random_schema
from decoder.constraints import Constraint
from service.common.types import ConstraintSpec, TextFormat
from service.engine.constraining import Constraining
from service.engine.grammars import GrammarConstraint
from service.engine.types import UnusableConstraint
from service.model.tokenizer import Tokenizer, literal

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 999}, "b": {"enum": ["x", "é\n"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def begun(constraining: Constraining, format: TextFormat, output: Sequence[int] = (), **options: Any) -> Any:
    ends = options.get("ends", frozenset({END}))
    stops = options.get("stops", frozenset())
    return constraining.begin(ConstraintSpec(format), ends, stops, output).result(timeout=60)


def schema(value: Any) -> TextFormat:
    return TextFormat("json_schema", json.dumps(value))


TAGS = TextFormat(
    "structural_tags",
    json.dumps(
        {
            "tags": [
                {"begin": "<f=one>", "kind": "json_schema", "content": '{"type": "integer"}', "end": "</f>"},
                {"begin": "<f=two>", "kind": "regex", "content": "[xy]+", "end": "</f>"},
                {"begin": "<f=three>", "kind": "lark", "content": 'start: "p" | "q"', "end": "</f>"},
            ],
            "triggers": ["<f="],
        }
    ),
)


@pytest.mark.parametrize(
    ("format", "pattern"),
    [
        (schema(SCHEMA), r'\{"a": \d+, "b": ("x"|"é\\(n|u000[aA])")\}'),
        (TextFormat("json_object"), r"\{.*\}"),
        (TextFormat("regex", "[ab]{3}/x"), "[ab]{3}/x"),
        (TextFormat("regex", "^(é|😀){1,4}$"), "(é|😀){1,4}"),
        (TextFormat("lark", 'start: "a" b+\nb: "c" | "d"'), "a[cd]+"),
        (TextFormat("choice", json.dumps(["a", "ab", 'é"\\\n', "a b/c"])), 'a|ab|é"\\\\\n|a b/c'),
        (TAGS, r"((?!<f=).|\n|<f=one>-?\d+</f>|<f=two>[xy]+</f>|<f=three>[pq]</f>)*"),
    ],
    ids=["schema", "object", "regex", "characters", "lark", "choice", "tags"],
)
def test_what_ends_by_itself_keeps_to_its_format(
    format: TextFormat, pattern: str, constraining: Constraining, tokenizer: Tokenizer
) -> None:
    rng, ended = random.Random(format.source), 0
    first = begun(constraining, format)
    for _ in range(20):
        drawn = walk(first.copy(), rng)
        if drawn[-1] == END:
            ended += 1
            assert re.fullmatch(pattern, tokenizer.decode(drawn), re.DOTALL), tokenizer.decode(drawn)
    assert ended >= 3


def test_a_trigger_is_followed_by_the_rest_of_a_tag(constraining: Constraining, tokenizer: Tokenizer) -> None:
    made = begun(constraining, TAGS, tokenizer.encode("before "))
    assert len(allowed(made)) > 800
    made.accept(*tokenizer.encode("<"))
    assert len(allowed(made)) > 800
    for token in tokenizer.encode("f="):
        made.accept(token)
    assert {tokenizer.decode([token])[0] for token in allowed(made)} == {"o", "t"}
    for token in tokenizer.encode("two>xyx"):
        made.accept(token)
    assert {tokenizer.decode([token])[0] for token in allowed(made)} <= {"x", "y", "<"}
    assert tokenizer.decode(made.forced()) == ""
    made.accept(*tokenizer.encode("<"))
    assert tokenizer.decode(made.forced()) == "/f>"


def test_a_special_token_can_begin_a_tag(constraining: Constraining, tokenizer: Tokenizer) -> None:
    tag = {"begin": "<|im_start|>a", "kind": "regex", "content": "[pq]", "end": "<s>"}
    made = begun(constraining, TextFormat("structural_tags", json.dumps({"tags": [tag], "triggers": []})))
    start = tokenizer.token_id("<|im_start|>")
    assert start in allowed(made)
    made.accept(start)
    for text in ("a", "q"):
        (token,) = tokenizer.encode(text)
        made.accept(token)
    assert allowed(made) == {tokenizer.token_id("<s>")}


@pytest.mark.parametrize("name", ["[CALL]", "<function=", "<a b>", "TEXT", "<[5]>"])
def test_special_tokens_of_any_name_begin_and_end_a_tag(name: str, tmp_path: Path) -> None:
    file = json.loads(TOKENIZER.read_text())
    file["model"]["vocab"][name] = 1000
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    file["added_tokens"].append({"id": 1000, "content": name, **plain})
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    own = Constraining(tmp_path / "tokenizer.json", VOCABULARY, frozenset({END}))
    tags = [
        {"begin": begin, "kind": "regex", "content": "[pq]", "end": end} for begin, end in ((name, "."), ("@", name))
    ]
    try:
        made = begun(own, TextFormat("structural_tags", json.dumps({"tags": tags, "triggers": []})))
    finally:
        own.close()
    tokens = Tokenizer(tmp_path / "tokenizer.json").encode(f"x{name}p.@q{name}")
    assert tokens.count(1000) == 2 and made.valid_prefix([*tokens, END]) == len(tokens) + 1


@pytest.mark.parametrize(
    ("format", "before", "goes_on"),
    [
        (TextFormat("lark", 'start: "a" <|im_end|> "b"'), "a", True),
        (TextFormat("lark", 'start: "a" <|im_end|>'), "a", False),
        (TextFormat("structural_tags", json.dumps(
            {"tags": [{"begin": "@", "kind": "regex", "content": "p", "end": "<|im_end|>."}], "triggers": []}
        )), "@p", True),
    ],
    ids=["goes on", "ends", "tag"],
)  # fmt: skip
def test_a_text_does_not_end_where_its_grammar_goes_on(
    format: TextFormat, before: str, goes_on: bool, constraining: Constraining, tokenizer: Tokenizer
) -> None:
    """An answer that ends by itself is valid: a grammar that has more after an end of text is refused."""
    made = begun(constraining, format)
    for token in tokenizer.encode(before):
        made.accept(token)
    if goes_on:
        with pytest.raises(UnusableConstraint, match=f"continues after the token {END}, which ends the text"):
            allowed(made)
    else:
        assert allowed(made) == {END}


SPACES = normalizers.Replace(" ", "\u2581")
PREFIX = normalizers.Sequence([normalizers.Prepend("\u2581"), SPACES])
ONE_SPACE = normalizers.Sequence([normalizers.Replace(Regex(" +"), " "), PREFIX])


@pytest.mark.parametrize("normalizer", [SPACES, PREFIX, ONE_SPACE], ids=["as it is", "space before", "one space"])
@pytest.mark.parametrize("fallback", [True, False])
def test_texts_that_a_grammar_forces_are_written_in_pieces_of_words(
    normalizer: normalizers.Normalizer, fallback: bool, tmp_path: Path
) -> None:
    """Tokenizers of SentencePiece write a space before each text, or write no two spaces: the texts have exactly the
    forced bytes all the same."""
    special = ["<unk>", "<s>", "<pad>", "<mask>", "<|im_end|>"]
    merges = [("\u2581", "{"), ("{", '"'), ('"', ":"), ('":', "\u2581"), ("\u2581", "a"), ("\u2581", "\u2581")]
    letters = [*map(chr, range(0x21, 0x7F)), "é", "\u2581"]
    never = '{"é'  # no merge produces it
    vocabulary = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *map("".join, merges), never]
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    raw = RawTokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizer
    strip = [decoders.Strip(" ", 1, 0)] if normalizer is not SPACES else []
    bytes_too = [decoders.ByteFallback()] if fallback else []
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *bytes_too, decoders.Fuse(), *strip])
    raw.add_special_tokens([AddedToken(token, special=True) for token in special])
    raw.save(str(tmp_path / "tokenizer.json"))
    own, reading = (
        Constraining(tmp_path / "tokenizer.json", VOCABULARY, frozenset({END})),
        Tokenizer(tmp_path / "tokenizer.json"),
    )
    value = {"type": "object", "properties": {"é  a": {"enum": ["é", 1]}}, "required": ["é  a"]}
    closed = {**value, "additionalProperties": False}
    texts = ['{"é  a": "é"}', '{"é  a": 1}']
    rng = random.Random(1)
    try:
        for text_format in (TextFormat("choice", json.dumps(texts)), TextFormat("json_schema", json.dumps(closed))):
            made = begun(own, text_format)
            drawn = [walk(made.copy(), rng) for _ in range(8)]
            assert {reading.decode(tokens) for tokens in drawn} == {*texts}
            assert made.forced()[0] == ids[never if normalizer is ONE_SPACE else '{"'], "as the tokenizer writes it"
    finally:
        own.close()


def test_a_forced_text_is_not_normalised(tmp_path: Path) -> None:
    """Qwen's tokenizers compose characters."""
    file = {**json.loads(TOKENIZER.read_text()), "normalizer": {"type": "NFC"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    texts, reading = ["e\u0301a", "e\u0301b"], Tokenizer(tmp_path / "tokenizer.json")
    own, rng = Constraining(tmp_path / "tokenizer.json", VOCABULARY, frozenset({END})), random.Random(1)
    try:
        made = begun(own, TextFormat("choice", json.dumps(texts)))
        assert {reading.decode(walk(made.copy(), rng)) for _ in range(8)} == {*texts}
    finally:
        own.close()


def test_forced_texts_have_only_ids_of_the_model() -> None:
    from service.model.token_bytes import ByteVocabulary

    word = ByteVocabulary(TOKENIZER, VOCABULARY).encode(" before")
    part = ByteVocabulary(TOKENIZER, word[0])  # a model with fewer ids than its tokenizer
    ids = part.encode(" before")
    assert len(word) == 1 < len(ids) and b"".join(part.tokens[i] for i in ids) == b" before"


def test_text_without_ids_has_none(tmp_path: Path) -> None:
    """A vocabulary need not have a token for unknown characters."""
    from service.model.token_bytes import ByteVocabulary

    raw = RawTokenizer(models.Unigram([("a", -1.0), ("b", -1.5), ("ab", -1.2)], None, False))
    raw.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])
    raw.save(str(tmp_path / "tokenizer.json"))
    vocabulary = ByteVocabulary(tmp_path / "tokenizer.json", 3)
    assert [vocabulary.encode(text) for text in ("aab", "ac", "\n")] == [[0, 2], [], []]


def test_fixed_texts_may_have_any_character(constraining: Constraining, tokenizer: Tokenizer) -> None:
    texts = ["\x00", "\x1f", "\x7f", "\u2028", "\ufeff", "\ufffd", "\U0010ffff", "//", "%json", "\\u0041"]
    made = begun(constraining, TextFormat("choice", json.dumps(texts)))
    tag = {"begin": "\x7f", "kind": "regex", "content": "[pq]", "end": "\x7f"}
    tags = begun(constraining, TextFormat("structural_tags", json.dumps({"tags": [tag], "triggers": []})))
    for first, output in ((tags, "x\x7fp\x7f"), *((made, text) for text in texts)):
        tokens = [*tokenizer.encode(output), END]
        assert first.valid_prefix(tokens) == len(tokens), output


def test_text_that_looks_like_a_special_trigger_is_never_drawn(
    constraining: Constraining, tokenizer: Tokenizer
) -> None:
    """It would be a trigger in the text that begins no tag."""
    tags = [
        {"begin": begin, "kind": "regex", "content": "[pq]", "end": end}
        for begin, end in (("<|im_start|>a", "."), ("<|im_start|>b", ""), ("</img>", ""), ("@", "."))
    ]
    made = begun(constraining, TextFormat("structural_tags", json.dumps({"tags": tags, "triggers": []})))
    special = tokenizer.encode("x<|im_start|>ap.y<|im_start|>bq</img>p@q.z")
    assert made.valid_prefix([*special, END]) == len(special) + 1
    for name in ("<|im_start|>", "</img>"):
        for text, fine in ((f"x @p.{name[:-1]}", True), (f"x{name}ap.", False), (f"@p.{name}ap.", False)):
            tokens = tokenizer.encode(literal(text, name))
            assert (made.valid_prefix(tokens) == len(tokens)) == fine, text


@pytest.mark.parametrize(
    "format", [schema(SCHEMA), TextFormat("regex", "[ab]+(c|dd)"), TAGS], ids=["json", "re", "tags"]
)
def test_a_constraint_is_a_function_of_its_tokens_alone(format: TextFormat, constraining: Constraining) -> None:
    """It does not matter how they were accepted, rolled back, copied or checked ahead."""
    rng = random.Random(5)
    for _ in range(15):
        made = begun(constraining, format)
        drawn = walk(made.copy(), rng, most=25)
        states, plain = [allowed(made)], made.copy()
        for token in drawn:
            plain.accept(token)
            states.append(allowed(plain))
        assert made.valid_prefix([*drawn, END, END][: len(drawn) + 2]) >= len(drawn)
        at = 0
        for _ in range(12):
            to = rng.randrange(len(drawn) + 1)
            if to < at:
                made.rollback(at - to)
            for token in drawn[at:to]:
                made.accept(token)
            at = to
            if rng.random() < 0.3:
                made = made.copy()
            assert allowed(made) == states[at]
            assert begun(constraining, format, drawn[:at]).valid_prefix(drawn[at:]) == len(drawn) - at
            forced = made.forced()
            assert made.valid_prefix(forced) == len(forced) and allowed(made) == states[at]
            wrong = next((t for t in range(VOCABULARY) if t not in states[at]), None)
            if wrong is not None and drawn[-1:] != [END]:
                assert made.valid_prefix([*drawn[at:][:0], wrong]) == 0


def test_look_ahead_counts_the_end_of_the_text(constraining: Constraining, tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    made = begun(constraining, TextFormat("regex", "a+b?"))
    assert made.valid_prefix([END]) == 0
    assert made.valid_prefix([a, END, a]) == 2
    assert made.valid_prefix([a, b, END]) == 3 and made.valid_prefix([a, b, a]) == 2 and made.valid_prefix([a, c]) == 1
    made.accept(a)
    assert made.valid_prefix([END]) == 1 and END in allowed(made)
    made.accept(b)
    assert allowed(made) == {END}
    made.accept(END)
    assert allowed(made) == set() and made.valid_prefix([a]) == 0 and made.forced() == []
    made.rollback(2)
    assert {a, b, END} <= allowed(made)


def test_ids_without_text_are_not_allowed(constraining: Constraining, tokenizer: Tokenizer) -> None:
    made = begun(constraining, TextFormat("regex", "(.|\n)*"))
    known = {i for i in range(VOCABULARY) if tokenizer.token(i) is not None and not tokenizer.silent(i)}
    assert allowed(made) - {END} <= known and END in allowed(made)
    assert len(allowed(made)) > 800


def test_several_ends_and_stop_ids(constraining: Constraining, tokenizer: Tokenizer) -> None:
    """A stop id that is not text ends a text where it may end; one that is text is a part of it."""
    (a,) = tokenizer.encode("a")
    special = tokenizer.token_id("<pad>")
    assert special is not None
    made = begun(constraining, TextFormat("regex", "a"), ends=frozenset({END, 1023}), stops=frozenset({special, a}))
    assert allowed(made) == {a}
    made.accept(a)
    assert allowed(made) == {END, 1023, special}
    made.accept(1023)
    made.rollback(2)
    assert allowed(made) == {a}
    with pytest.raises(UnusableConstraint, match="no end-of-sequence id"):
        begun(constraining, TextFormat("regex", "a"), ends=frozenset())
    begun(constraining, TextFormat("regex", "a"), ends=frozenset(), stops=frozenset({special}))


def test_output_that_exists_is_accepted_first(constraining: Constraining, tokenizer: Tokenizer) -> None:
    made = begun(constraining, schema(SCHEMA), tokenizer.encode('{"a": 12'))
    assert tokenizer.encode("3")[0] in allowed(made)
    right, wrong = tokenizer.encode('{"'), tokenizer.encode("bb")
    kept = f"only the first {len(right)} of the {len(right) + len(wrong)} ids satisfy"
    with pytest.raises(UnusableConstraint, match=kept) as error:
        begun(constraining, schema(SCHEMA), [*right, *wrong])
    assert error.value.field == "continued_token_ids"


@pytest.mark.parametrize(
    ("format", "words"),
    [
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "string", "format": "nonsense"}), "nonsense"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (schema({"$ref": "http://elsewhere/schema"}), "elsewhere"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "of oneOf may overlap.*; use anyOf, at /oneOf"),
        (schema({"type": "array", "items": {"type": "object", "x-guidance": {"lenient": True}, "not": {}}}), "not"),
        (schema(False), "nsatisfiable"),
        (schema({"type": "integer", "const": -(2**63)}), "-9223372036854775808 would be rounded"),
        (schema({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}), "minimum is -9223372036854775808"),
        (schema({"type": "integer", "minimum": -(10**300)}), "minimum is -10+[.]{3}; numbers beyond 9007199254740991"),
        (schema({"default": {"multipleOf": 4_000_003}, "$ref": "#/default"}), "multipleOf is 4000003.* 50000 is"),
        (schema({"allOf": [{"multipleOf": 9.97}, {"multipleOf": 991}]}), "is 988027; at most 50000 is implemented"),
        (
            TextFormat("lark", 'start: "a" %json\n{"const": 9007199254740993}'),
            "%json: 9007199254740993 would be rounded",
        ),
        (TextFormat("json_schema", "[" * 200 + "]" * 200), "recursion"),
        (TextFormat("regex", "[ab"), "unclosed"),
        (TextFormat("regex", "(?=a)b"), "look-around"),
        (TextFormat("regex", "(" * 20000 + "a" + ")" * 20000), "regex"),
        (TextFormat("lark", "start: foo"), "foo"),
        (TextFormat("lark", "no definition"), "(?i)expected|unexpected|parse|start"),
        (TextFormat("lark", "start: start"), "there is no text that it allows"),
        (TextFormat("regex", r"[^\s\S]"), "there is no text that it allows"),
        (schema({"$ref": "#"}), "there is no text that it allows"),
        (TextFormat("lark", "start: " + "(" * 20000 + '"a"' + ")" * 20000), "nested"),
    ],
    ids=lambda value: value.source[:40] if isinstance(value, TextFormat) else "",
)
def test_what_cannot_be_served_is_refused(format: TextFormat, words: str, constraining: Constraining) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(UnusableConstraint, match=words) as error:
            begun(constraining, format)
        assert error.value.field == f"sampling.response_format.{format.kind}"
        assert len(str(error.value)) < 400


def doubling(levels: int, name: str = "T") -> TextFormat:
    """A Lark grammar whose last terminal has 2^levels times the first one."""
    lines = [f"{name}{i}: {name}{i - 1} {name}{i - 1}" for i in range(1, levels + 1)]
    return TextFormat("lark", "\n".join([f"start: {name}{levels}", f'{name}0: "x"?', *lines]))


def conjunction(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"^a{{{i},}}$"} for i in range(count)]


def defined(count: int, keyword: str = "") -> dict[str, Any]:
    """A schema of `$ref`s to others with a pattern each, by their anchors if `keyword` is that."""
    parts = {f"d{i}": {**part, **({keyword: f"d{i}"} if keyword else {})} for i, part in enumerate(conjunction(count))}
    prefix = "#" if keyword else "#/$defs/"
    return {"$defs": parts, "allOf": [{"$ref": f"{prefix}{name}"} for name in parts]}


@pytest.mark.parametrize(
    ("format", "words"),
    [
        (TextFormat("regex", "x*" * 8193), "has 16386 characters; at most 16384 are implemented"),
        (TextFormat("choice", json.dumps(["no", "x" * 8193])), "a fixed text has 8193 characters; at most 8192 are"),
        (TextFormat("lark", f'start: "{"x" * 8193}"'), "a fixed text has 8193 characters"),
        (schema({"properties": {"a": {"enum": [1, {"b": "x" * 8192}]}}}), "a fixed text has 8201 characters"),
        (schema({"items": {"const": "x" * 8191}}), "a fixed text has 8193 characters"),
        (schema({"$ref": "#/default", "default": {"const": "x" * 8191}}), "a fixed text has 8193 characters"),
        (schema({"$ref": "#/default", "default": {"pattern": "x*" * 8193}}), "has 16386 characters"),
        (schema({"type": "string", "pattern": "x*" * 8193}), "has 16386 characters"),
        (schema({"patternProperties": {"x*" * 8193: {}}}), "has 16386 characters"),
        (TextFormat("lark", f"start: T\nT: /{'x*' * 8193}/"), "has 16386 characters"),
        (TextFormat("lark", f"start: %json {json.dumps({'pattern': 'x*' * 8193})}"), "has 16386 characters"),
        (doubling(17), "T[0-9]+ has [0-9]+ characters when others are written out in it; at most 65536"),
        (doubling(60, "_LONGER_"), "_LONGER_[0-9]+ has"),
        (TextFormat("lark", "start: A\nA: B\nB: A"), "contains itself"),
        (TextFormat("lark", "start: T\nT: " + " & ".join(["/.*/"] * 17)), "T intersects 17 expressions; at most 16"),
        (schema({"allOf": conjunction(17)}), "has to match 17 schemas with patterns or formats; at most 16"),
        (schema(defined(17)), "has to match 17 schemas"),
        (schema(defined(17, "$anchor")), "has to match [0-9]+ schemas"),
        (schema({"allOf": [{"properties": {"p": part}} for part in conjunction(17)]}), "has to match 17 schemas"),
        (schema({"allOf": [*conjunction(8), {"anyOf": [{"allOf": conjunction(9)}, {}]}]}), "has to match 17 schemas"),
    ],
    ids=lambda value: f"{value.kind}-{value.source[-40:]}" if isinstance(value, TextFormat) else "",
)
def test_what_expands_beyond_measure_is_refused(format: TextFormat, words: str, constraining: Constraining) -> None:
    with pytest.raises(UnusableConstraint, match=words) as error:
        begun(constraining, format)
    assert error.value.field == f"sampling.response_format.{format.kind}"


@pytest.mark.parametrize(
    "format",
    [
        TextFormat("regex", "(abc|de)?" * 1000),
        doubling(9),
        TextFormat("lark", "start: A B\nA: /a+/ & /.{3}/\nB: LETTER{4}\nLETTER: /[a-z]/"),
        schema({"allOf": conjunction(3)}),
        schema({"type": "object", "properties": {f"p{i}": part for i, part in enumerate(conjunction(40))}}),
        schema({"anyOf": conjunction(40)}),
        schema({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}),
    ],
    ids=lambda value: f"{value.kind}-{value.source[-40:]}",
)
def test_what_does_not_expand_much_is_served(format: TextFormat, constraining: Constraining) -> None:
    assert begun(constraining, format).valid_prefix([]) == 0


MANY = {f"p{i}": {"type": "string", "minLength": 2} for i in range(500)}
WRONG = {"type": "strnig"}
TREE = {"properties": {"next": {"$ref": "#/$defs/tree"}, "value": WRONG}}


@pytest.mark.parametrize(
    ("value", "pointer"),
    [
        (WRONG, "/type"),
        ({"anyOf": 3}, "/anyOf"),
        ({"required": "a"}, "/required"),
        ({"properties": []}, "/properties"),
        ({"properties": {"a": {"items": {"minLength": "x"}}}}, "/properties/a/items/minLength"),
        ({"properties": {"b": {"not": {}}, "a": {}}}, "/properties/b/not"),
        ({"properties": {"a": {"format": "nonsense"}}}, "/properties/a/format"),
        ({"properties": {"a": {"uniqueItems": True, "contains": {}}}}, "/properties/a"),
        ({"properties": {"a/b~c": WRONG}}, "/properties/a~1b~0c/type"),
        ({"additionalProperties": {"prefixItems": {}}}, "/additionalProperties/prefixItems"),
        ({"prefixItems": [{}, WRONG]}, "/prefixItems/1/type"),
        ({"allOf": [{}, {"anyOf": [{"type": "integer"}, {"pattern": "("}]}]}, "/allOf/1/anyOf/1/pattern"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"items": WRONG}}}, "/$defs/x/items/type"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "/properties/a/$ref"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": WRONG}}, "/properties/b/type"),
        ({"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}, "/$defs/tree/properties/value/type"),
        ({"properties": {**MANY, "last": WRONG}}, "/properties/last/type"),
        ({"properties": {"enum": WRONG}}, "/properties/enum/type"),
        ({"properties": {"t": {"format": "time", "allOf": 3}}}, "/properties/t/allOf"),
        ({"properties": {"a/b": {"enum": [0, {"x": [2**53 + 1]}]}}}, "/properties/a~1b/enum/1/x/0"),
        ({"$defs": {"n": {"exclusiveMinimum": 2**53}}}, "/$defs/n/exclusiveMinimum"),
        ({"anyOf": [{"multipleOf": 499}, {"multipleOf": 503}]}, "/anyOf/1/multipleOf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_error_says_where_in_the_schema_the_fault_is(value: Any, pointer: str, constraining: Constraining) -> None:
    with pytest.raises(UnusableConstraint) as error:
        begun(constraining, schema(value))
    assert str(error.value).startswith("json_schema: ") and str(error.value).endswith(f", at {pointer}")


def test_a_pointer_is_not_longer_than_a_message(constraining: Constraining) -> None:
    with pytest.raises(UnusableConstraint, match="Invalid type: strnig, at /properties/xxx.*[.]{3}$") as error:
        begun(constraining, schema({"properties": {"x" * 5000: WRONG}}))
    assert len(str(error.value)) < 400


def test_the_error_of_a_tags_schema_names_the_tag(constraining: Constraining) -> None:
    contents = [("json_schema", "{}"), ("regex", "x"), ("json_schema", json.dumps({"items": WRONG}))]
    tags = [{"begin": f"<{i}>", "kind": k, "content": c, "end": "</>"} for i, (k, c) in enumerate(contents)]
    with pytest.raises(UnusableConstraint) as error:
        begun(constraining, TextFormat("structural_tags", json.dumps({"tags": tags, "triggers": ["<"]})))
    assert str(error.value) == "structural_tags: tags[2].json_schema: Invalid type: strnig, at /items/type"


def chain(length: int) -> str:
    rules = [f"r{i}: r{i + 1}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


def test_a_grammar_as_deep_as_a_request_can_be_does_not_overflow_the_stack(constraining: Constraining) -> None:
    """On a stack of the default size, this ended the whole process."""
    made = begun(constraining, TextFormat("lark", chain(10_000)))
    assert isinstance(made, GrammarConstraint)


def test_equal_formats_are_compiled_once_and_old_ones_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from service.engine import grammars
    from service.model.token_bytes import ByteVocabulary

    made = grammars.Grammars(ByteVocabulary(TOKENIZER, VOCABULARY), {END})
    monkeypatch.setattr(grammars, "MAX_CACHED", 3)
    first = made.grammar(TextFormat("regex", "0"))
    assert made.grammar(TextFormat("regex", "0")) is first
    for i in range(1, 4):
        made.grammar(TextFormat("regex", str(i)))
    assert made.grammar(TextFormat("regex", "0")) is not first


def test_texts_that_a_grammar_forces_are_tokenized_once() -> None:
    """Tokenizing them takes longer than computing the rest of a mask."""
    from service.engine.grammars import Grammars
    from service.model.token_bytes import ByteVocabulary

    class Counting(ByteVocabulary):
        texts: list[str] = []

        def encode(self, text: str) -> list[int]:
            self.texts.append(text)
            return super().encode(text)

    vocabulary = Counting(TOKENIZER, VOCABULARY)
    grammar = Grammars(vocabulary, {END}).grammar(schema(SCHEMA))
    drawn = walk(grammar.start({END}), random.Random(1))
    assert drawn[-1] == END and len(vocabulary.texts) > 5
    known = len(vocabulary.texts)
    again = grammar.start({END})
    for token in drawn[:-1]:
        allowed(again)
        again.accept(token)
    assert len(vocabulary.texts) == known == len(set(vocabulary.texts))


def test_bad_words_are_not_written_with_any_tokens(constraining: Constraining, tokenizer: Tokenizer) -> None:
    """Without the constraint, random text over few letters soon contains every short string."""
    letters = [token for letter in "abc" for token in tokenizer.encode(letter)]
    letters += [i for i in range(VOCABULARY) if set(tokenizer.decode([i])) and set(tokenizer.decode([i])) <= set("abc")]
    bad = ("ab", "cac", "bbb")
    for words in ((), bad):
        spec = ConstraintSpec(None, frozenset(letters), words)
        made = constraining.begin(spec, frozenset({END}), frozenset(), ()).result(timeout=60)
        rng, drawn = random.Random(1), list[int]()
        for _ in range(400):
            token = rng.choice(sorted(allowed(made) - {END}))
            assert made.valid_prefix([token]) == 1
            made.accept(token)
            drawn.append(token)
        text = tokenizer.decode(drawn)
        assert [word for word in bad if word in text] == ([] if words else list(bad))
    twin = made.copy()
    made.rollback(37)
    for token in drawn[-37:]:
        made.accept(token)
    assert allowed(made) == allowed(twin)


class Late(Sequence[int]):
    """Ids that are there when `given` is set; `asked`: whether they have been asked for."""

    def __init__(self) -> None:
        self.asked, self.given = threading.Event(), threading.Event()

    def __len__(self) -> int:
        self.asked.set()
        assert self.given.wait(60)
        return 0

    def __getitem__(self, index: Any) -> Any:
        raise IndexError(index)


def test_tenants_take_turns(constraining: Constraining) -> None:
    """Also those whose constraints are cancelled before their turn."""
    late, order, spec = Late(), SimpleQueue[str](), ConstraintSpec(None, frozenset({1}))

    def begin(name: str, output: Sequence[int] = ()) -> Future[Constraint]:
        future = constraining.begin(spec, frozenset({END}), frozenset(), output, name[:1].encode())
        future.add_done_callback(lambda done: order.put(f"{name} cancelled" if done.cancelled() else name))
        return future

    begin("a1", late)
    assert late.asked.wait(60)
    futures = {name: begin(name) for name in ("a2", "a3", "a4", "b1", "b2", "c1")}
    assert futures["b1"].cancel()
    late.given.set()
    assert [order.get(timeout=60) for _ in range(7)] == ["b1 cancelled", "a1", "a2", "c1", "a3", "b2", "a4"]


def test_bad_words_of_many_bytes(constraining: Constraining, tokenizer: Tokenizer) -> None:
    """Written byte by byte, the last byte is the one that is not allowed; tokens without text change nothing."""
    spec = ConstraintSpec(None, None, ("€uro",))
    made = constraining.begin(spec, frozenset({END}), frozenset(), ()).result(timeout=60)
    ids = tokenizer.encode("€uro")
    assert made.valid_prefix(ids) == len(ids) - 1
    special = tokenizer.token_id("<pad>")
    assert special is not None
    assert made.valid_prefix([*ids[:-1], special, 1000, ids[-1]]) == len(ids) + 1
    assert {special, END, 1000} <= allowed(made)
    for token in ids[:-1]:
        made.accept(token)
    assert ids[-1] not in allowed(made)


def test_a_sample_of_schemas(constraining: Constraining, tokenizer: Tokenizer) -> None:
    """Random walks through schemas with every kind of keyword, validated by another implementation."""
    schemas: list[dict[str, Any]] = [
        {"type": "array", "items": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 7}, "maxItems": 3},
        {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "multipleOf": 7}]},
        {"type": "string", "pattern": "^[a-c]{2,5}-\\d$"},
        {"type": "string", "format": "date"},
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}}, "$ref": "#/$defs/n"},
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        {"type": "object", "patternProperties": {"^k": {"const": 1}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"type": ["integer", "null"]}}, "minProperties": 1, "required": ["a"]},
    ]
    rng, ended = random.Random(2), 0
    schemas += [random_schema(random.Random(seed)) for seed in range(40)]
    for value, _ in itertools.product(schemas, range(2)):
        drawn = walk(begun(constraining, schema(value)), rng, most=400)
        if drawn[-1] == END:
            ended += 1
            found = json.loads(tokenizer.decode(drawn))
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(value, format_checker=checker).validate(found)
    assert ended > 60


@pytest.mark.parametrize(
    "value",
    [
        {"type": "integer", "const": 2**60},
        {"enum": [-(2**53) + 1, 1e15, 0.1, [2**62]]},
        {"type": "integer", "minimum": 2**53 - 2, "exclusiveMaximum": 2**53 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**63},
        {"type": "integer", "multipleOf": 360, "minimum": 0, "maximum": 10**4},
        {"type": "number", "multipleOf": 12.5, "minimum": 0, "maximum": 1000},
        {"properties": {"minimum": {"const": True}, "multipleOf": {"const": False}}, "type": "object"},
    ],
    ids=str,
)
def test_numbers_are_kept_to_exactly(value: Any, constraining: Constraining, tokenizer: Tokenizer) -> None:
    rng, ended = random.Random(3), 0
    for _ in range(20):
        drawn = walk(begun(constraining, schema(value)), rng, end=0.9)
        if drawn[-1] == END:
            ended += 1
            jsonschema.Draft202012Validator(value).validate(json.loads(tokenizer.decode(drawn)))
    assert ended


@pytest.mark.parametrize("format", ["time", "date-time"])
def test_no_minute_has_a_second_60(format: str, constraining: Constraining, tokenizer: Tokenizer) -> None:
    start = '"23:59:' if format == "time" else '"2016-12-31T23:59:'
    made = begun(constraining, schema({"type": "string", "format": format}), tokenizer.encode(start))
    assert {tokenizer.decode([token]) for token in allowed(made)} == set("012345")
    named = {"properties": {"default": {"format": format, "type": "string"}}, "required": ["default"]}
    made = begun(constraining, schema({"type": "object"} | named), tokenizer.encode('{"default": ' + start))
    assert {tokenizer.decode([token]) for token in allowed(made)} == set("012345")
    data = {"enum": [{"format": "time"}]}
    assert '{"format": "time"}' in tokenizer.decode(walk(begun(constraining, schema(data)), random.Random(1)))
