"""Converts tools to a grammar of their calls in a model's markup. Schemas that the markup cannot express are rejected,
with the names of the tool and of the keyword.

The source of such a format is JSON: `{"markup": {"begin", "end", "body"}, "tools": [{"name", "schema"}], "required",
"parallel", "answer"}`; a schema is null if the arguments may be any object. `required`: the text consists of one call
or more. `answer`: kind and source of the format of a text without calls, which `required` excludes; null: the text is
free, and the marker of a call in it begins a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from families.tool_literals import KEYWORD
from families.tool_values import TYPES, typed

Literal = Callable[[str], str]
"""Converts a fixed text to Lark source, in which special tokens are references to tokens."""
_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated", "readOnly", "writeOnly",
})  # fmt: skip
_OBJECT = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "strict"}
_STRING = _ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength", "pattern", "format"}
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[a-z0-9][a-z0-9_+-]{0,30}@[a-z0-9][a-z0-9-]{0,30}(\.[a-z]{2,10}){1,2}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])",
}
"""Regular expressions for the values of `format`. Each matches common values only, which is enough for answers."""
_CLOSE = "\n</parameter>\n"
_AROUND = {
    "list": ('"["', '", "', '"]"'), "python": ('"["', '", "', '"]"'), "lines": (r'"\n"?', r'"\n"', r'"\n"?'),
}  # fmt: skip
"""Lark source for what precedes, separates and follows the calls between two markers, in markups with several calls
there."""


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "type": ("a string or a list of strings", lambda value: isinstance(value, str) or _are_strings(value)),
    "required": ("a list of strings", _are_strings),
    "enum": ("a list", lambda value: isinstance(value, list)),
    "format": ("a string", lambda value: isinstance(value, str)),
}
"""What the values of keywords must be, in words and as a check."""
_MAX_LENGTH = 2000
"""Largest `minLength` and `maxLength` that are counted."""


class ToolGrammar:
    """Collects the rules of a grammar."""

    def __init__(self, source: str, literal: Literal, content: Callable[[str, str], dict[str, Any]]) -> None:
        """`content`: makes llguidance's grammar, without a name, for the kind and source of a format."""
        self._format = json.loads(source)
        self._literal, self._content = literal, content
        self._markup = self._format["markup"]
        self._rules: list[str] = []
        self._parts: list[dict[str, Any]] = []

    def grammars(self) -> list[dict[str, Any]]:
        """The grammars for llguidance. The first one is that of the whole text. Raises ValueError."""
        calls = [self._call(tool["name"], tool["schema"]) for tool in self._format["tools"]]
        any_call = self._rule(" | ".join(calls))
        begin, end = self._literal(self._markup["begin"]), self._literal(self._markup["end"])
        several = self._format["parallel"]
        together = self._markup["body"] in _AROUND
        if together:
            before, between, after = _AROUND[self._markup["body"]]
            more = f" ({between} {any_call})*" if several else ""
            rest = self._rule(f"{before} {any_call}{more} {after} {end}")
        else:
            rest = self._rule(f'"\\n" {any_call} "\\n" {end}')
        if self._format["required"] or self._format["answer"]:
            more = f' ("\\n" {begin} {rest})*' if several and not together else ""
            start = f"start: {begin} {rest}{more}"
            if self._format["answer"]:  # compiled even if it is never used, so that errors in it are found
                self._parts.append({"name": "answer", **self._content(*self._format["answer"])})
                start += "" if self._format["required"] else " | @answer"
        else:
            start = self._free(begin, rest)
        return [{"name": "calls", "lark_grammar": "\n".join([start, *self._rules])}, *self._parts]

    def _free(self, begin: str, rest: str) -> str:
        """Text in which the marker is followed by the rest of a call."""
        if begin.startswith("<"):  # a special token: its name spelled in other tokens would begin a call, too
            self._rules.append(text_without([self._markup["begin"]]))
            return f"start: (TEXT {begin} {rest})* TEXT"
        self._rules.append(text_without([]))
        self._rules.append(f"trigger[lazy]: TEXT {begin}")
        return f"start: (trigger {rest})* TEXT"

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _json(self, schema: Any) -> str:
        name = f"j{len(self._parts)}"
        self._parts.append({"name": name, **self._content("json_schema", json.dumps(schema))})
        return f"@{name}"

    def _call(self, name: str, schema: Mapping[str, Any] | None) -> str:
        """The rule for a call of one tool, between the markers."""
        if schema is not None and "x-guidance" in schema:
            raise ValueError(f"tool {name!r}: x-guidance cannot be set")
        if self._markup["body"] in ("python", "lines"):
            return self._python_call(name, schema)
        if self._markup["body"] != "xml":
            arguments = self._json({"type": "object"} if schema is None else _object(schema))
            return self._rule(f'{quoted(f"""{{"name": {json.dumps(name)}, "arguments": """)} {arguments} "}}"')
        parts = [self._literal(f"<function={name}>\n")]
        if schema is None:
            close = self._raw(".*", "")
            parts.append(f'({self._literal("<parameter=")} {self._any_key()} ">\\n" {close})*')
        else:
            parts += self._parameters(name, schema)
        return self._rule(" ".join([*parts, self._literal("</function>")]))

    def _any_key(self) -> str:
        """The rule for the name of any parameter."""
        if "KEY: /[A-Za-z0-9_]{1,64}/" not in self._rules:
            self._rules.append("KEY: /[A-Za-z0-9_]{1,64}/")
        return self._rule("KEY")

    def _parameters(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        made = []
        for key, inner, required in _properties(name, schema, lambda key: ">" not in key and key == key.strip()):
            value = self._value(f"tool {name!r}, parameter {key!r}", inner, _definitions(schema))
            parameter = self._rule(f'{self._literal(f"<parameter={key}>")} "\\n" {value}')
            made.append(parameter if required else f"{parameter}?")
        return made

    def _python_call(self, name: str, schema: Mapping[str, Any] | None) -> str:
        """The rule for a call with keyword arguments, which are in the order of the properties."""
        head = self._literal(f"{name}(")
        if schema is None:
            pair = self._rule(f'{self._any_key()} "=" {self._json({})}')
            return self._rule(f'{head} ({pair} (", " {pair})*)? ")"')
        firsts, tail = [""], ""  # what the arguments from here on can be: without another before them, and after one
        for key, inner, required in reversed(_properties(name, schema, KEYWORD.fullmatch)):
            value = self._literal_value(f"tool {name!r}, parameter {key!r}", inner, _definitions(schema))
            argument = self._rule(f"{self._literal(f'{key}=')} {value}")
            firsts = [f"{argument} {tail}", *([] if required else firsts)]
            tail = self._rule(f'(", " {argument}){"" if required else "?"} {tail}')
        return self._rule(" | ".join(f'{head} {first} ")"' for first in firsts))

    def _literal_value(self, where: str, schema: Any, definitions: Mapping[str, Any]) -> str:
        """The rule for the value of a keyword argument, as JSON, which is read like Python's literals. In lists of
        calls, booleans are in Python's notation."""
        schema = _followed(where, schema, definitions)
        if schema is True:
            return self._json({})
        if not isinstance(schema, dict) or "x-guidance" in schema:
            raise ValueError(f"{where}: this schema is not implemented in this markup")
        plain = not schema.keys() - _ANNOTATIONS - {"type"}
        if self._markup["body"] == "python" and plain and _kind(schema) == "boolean":
            return self._rule('"True" | "False"')
        return self._json({**schema, **definitions})

    def _value(self, where: str, schema: Any, definitions: Mapping[str, Any]) -> str:
        """The rule for a value up to the end of its tag. Strings are written literally, other values as JSON."""
        schema = _followed(where, schema, definitions)
        if schema is True or schema == {} or (isinstance(schema, dict) and not schema.keys() - _ANNOTATIONS):
            return self._raw(".*", "")
        if not isinstance(schema, dict) or "x-guidance" in schema:
            raise ValueError(f"{where}: this schema is not implemented in this markup")
        if (strings := _strings(where, schema, definitions)) is not None:
            rules = [self._string(where, each) for each in strings.schemas]
            return self._rule(" | ".join([*rules, *([self._texts(where, ["null"])] if strings.or_null else [])]))
        values = _listed(schema)
        if any(isinstance(value, str) for value in values):
            return self._mixed(where, schema, values)
        if _may_be_string(where, schema, definitions):
            raise ValueError(f"{where}: a union of strings with other types cannot be told apart in this markup")
        return self._rule(f"{self._json({**schema, **definitions})} {quoted(_CLOSE)}")

    def _mixed(self, where: str, schema: Mapping[str, Any], values: list[Any]) -> str:
        """The rule for one of several values, some of them strings. A string that looks like another value would be
        read as that value, so it is rejected unless that value is listed, too."""
        _check_alone(where, schema)
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        known = {json.dumps(value) for value in values}
        for text in texts:
            read = json.dumps(json.loads(typed(text, {"properties": {"value": schema}}, "value")))
            if read not in known:
                raise ValueError(f"{where}: {text[:50]!r} would be read as {read[:50]}, which is none of its values")
        return self._texts(where, texts)

    def _string(self, where: str, schema: Mapping[str, Any]) -> str:
        _check_keywords(where, schema, _STRING)
        if "enum" in schema or "const" in schema:
            _check_alone(where, schema)
            return self._texts(where, [value for value in _listed(schema) if isinstance(value, str)])
        least, most = _length(where, schema, "minLength") or 0, _length(where, schema, "maxLength")
        length = ".*" if not least and most is None else f".{{{least},{'' if most is None else most}}}"
        extra = ""
        if "pattern" in schema:
            extra += f" & /(?s:{_searched(where, schema['pattern'])})\\n<\\/parameter>\\n/"
        if "format" in schema:
            if schema["format"] not in _FORMATS:
                raise ValueError(f"{where}: format {schema['format']!r} is not implemented, only {', '.join(_FORMATS)}")
            extra += f" & /(?:{_FORMATS[schema['format']]})\\n<\\/parameter>\\n/"
        return self._raw(length, extra)

    def _raw(self, length: str, extra: str) -> str:
        """A text up to the end of its tag, which it does not contain; one lexeme."""
        name = f"V{len(self._rules)}"
        once = "~/(?s:.*<\\/parameter>.*<\\/parameter>.*)/"
        self._rules.append(f"{name}: /(?s:{length})\\n<\\/parameter>\\n/ & {once}{extra}")
        return self._rule(name, "[lazy]")

    def _texts(self, where: str, texts: list[str]) -> str:
        if not texts or any("</parameter>" in text for text in texts):
            raise ValueError(f"{where}: none of its values can be written in this markup")
        return self._rule(f"({' | '.join(quoted(text + _CLOSE) for text in texts)})")


def text_without(texts: Collection[str]) -> str:
    """A terminal of Lark for any text that contains none of `texts`."""
    pattern = "|".join(map(re.escape, texts)).replace("/", "\\/")
    return "TEXT: /(.|\\n)*/" + (f" & ~/(?s:.*({pattern}).*)/" if texts else "")


def quoted(text: str) -> str:
    """A string literal of Lark. It has the syntax of JSON, except that the library does not accept a literal U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _properties(name: str, schema: Mapping[str, Any], fits: Callable[[str], object]) -> list[tuple[str, Any, bool]]:
    """Name, schema and necessity of each parameter of a tool. `fits`: whether the markup can express a name. Raises
    ValueError."""
    _check_keywords(f"tool {name!r}", schema, _OBJECT)
    _check_forms(f"tool {name!r}", schema)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if lost := [key for key in required if key not in properties]:
        raise ValueError(f"tool {name!r}: {lost[0]!r} is required, but is none of the {len(properties)} properties")
    for key in properties:
        if not 1 <= len(key) <= 256 or not fits(key):
            raise ValueError(f"tool {name!r}: a parameter cannot be named {key[:50]!r}")
    return [(key, inner, key in required) for key, inner in properties.items()]


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    closed = {} if schema.get("properties") else {"properties": {}, "additionalProperties": False}
    return {**(closed if not schema.keys() - _ANNOTATIONS - {"type", "properties"} else {}), **schema, "type": "object"}


def _check_keywords(where: str, schema: Mapping[str, Any], known: frozenset[str]) -> None:
    if extra := sorted(schema.keys() - known):
        raise ValueError(f"{where}: {extra[0][:50]!r} is not implemented in this markup")


def _check_forms(where: str, schema: Mapping[str, Any]) -> None:
    """Raises ValueError if a keyword that is read here has a value of a type that it cannot have in a JSON schema."""
    for keyword, (form, fits) in _FORMS.items():
        if keyword in schema and not fits(schema[keyword]):
            raise ValueError(f"{where}: {keyword} must be {form}")


def _length(where: str, schema: Mapping[str, Any], keyword: str) -> int | None:
    """The value of `minLength` or `maxLength`; None without it. Raises ValueError."""
    length = schema.get(keyword)
    if length is None:
        return None
    if type(length) is not int or length < 0:
        raise ValueError(f"{where}: {keyword} must be a whole number from 0 on")
    if length > _MAX_LENGTH:
        raise ValueError(f"{where}: {keyword} is {length}; at most {_MAX_LENGTH} is implemented")
    return length


def _check_alone(where: str, schema: Mapping[str, Any]) -> None:
    if len(schema.keys() - _ANNOTATIONS - {"type"}) > 1:
        raise ValueError(f"{where}: enum with further keywords is not implemented")


class _Strings(NamedTuple):
    schemas: list[dict[str, Any]]
    or_null: bool


def _strings(where: str, schema: dict[str, Any], definitions: Mapping[str, Any]) -> _Strings | None:
    """The schemas of the strings of which a schema consists, and whether null is allowed beside them; None if other
    values are, or if the schema lists values of several types."""
    if _kind(schema) == "string":
        return _Strings([schema], or_null=False)
    types = schema.get("type")
    if isinstance(types, list) and "string" in types and not schema.keys() & {"enum", "const"}:
        if set(types) - {"string", "null"}:
            raise ValueError(f"{where}: a string, and {', '.join(sorted(set(types) - {'string'}))}, look alike here")
        return _Strings([{**schema, "type": "string"}], or_null="null" in types)
    choices = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(choices, list) or len(schema.keys() - _ANNOTATIONS) != 1:
        return None
    followed = [_followed(where, choice, definitions) for choice in choices]
    strings = [choice for choice in followed if _kind(choice) == "string"]
    if not strings or any(_kind(choice) not in ("string", "null") for choice in followed):
        return None
    if "oneOf" in schema:
        _check_disjoint(where, strings)
    return _Strings(strings, or_null=len(strings) < len(followed))


def _check_disjoint(where: str, strings: list[dict[str, Any]]) -> None:
    """Raises ValueError if a string may be of several of these schemas."""
    values = [value for choice in strings for value in _listed(choice)]
    if len(strings) > 1 and not (all(map(_listed, strings)) and len({*values}) == len(values)):
        raise ValueError(f"{where}: oneOf of strings that may overlap is not implemented")


def _listed(schema: Mapping[str, Any]) -> list[Any]:
    """The values of `enum` or `const` that the schema's type allows; empty without these keywords."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return []
    types = schema.get("type")
    allowed = [types] if isinstance(types, str) else types
    return values if not isinstance(allowed, list) else [value for value in values if _is_one_of(value, allowed)]


def _is_one_of(value: Any, types: list[Any]) -> bool:
    kind = TYPES[type(value)]
    if kind in ("integer", "number") and "number" in types:
        return True
    return kind in types or (kind == "number" and "integer" in types and value.is_integer())


def _kind(schema: Any) -> str:
    """The type of a schema, from `type` or its listed values; empty if it may have several."""
    if not isinstance(schema, Mapping):
        return ""
    if isinstance(schema.get("type"), str):
        return str(schema["type"])
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and "type" not in schema:
        if all(isinstance(value, str) for value in values):
            return "string"
        if values == [None]:
            return "null"
    return ""


def _followed(where: str, schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema after following its references. Raises ValueError, also for keywords with values of wrong types."""
    for _ in range(16):
        if not isinstance(schema, Mapping):
            return schema
        if "$ref" not in schema:
            _check_forms(where, schema)
            return schema
        if schema.keys() - _ANNOTATIONS - {"$ref"}:
            raise ValueError(f"{where}: $ref with other keywords is not implemented")
        found: Any = definitions
        for name in str(schema["$ref"]).removeprefix("#/").split("/"):
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if found is None:
            raise ValueError(f"{where}: {str(schema['$ref'])[:50]!r} is not in the schema")
        schema = found
    raise ValueError(f"{where}: more than 16 references in a row")


def _may_be_string(where: str, schema: Any, definitions: Mapping[str, Any], depth: int = 8) -> bool:
    """Whether a value can be a string, for schemas that are written as JSON."""
    schema = _followed(where, schema, definitions)
    if not isinstance(schema, Mapping) or not depth:
        return True
    types = schema.get("type")
    if types is not None:
        return "string" in ([types] if isinstance(types, str) else types)
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return any(isinstance(value, str) for value in values)
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return any(_may_be_string(where, choice, definitions, depth - 1) for choice in schema[name])
    if isinstance(schema.get("allOf"), list):
        return all(_may_be_string(where, part, definitions, depth - 1) for part in schema["allOf"])
    return True


def _searched(where: str, pattern: Any) -> str:
    """A JSON schema's pattern, which may match anywhere in a text, as a regular expression for the whole text."""
    if not isinstance(pattern, str):
        raise ValueError(f"{where}: pattern is not a string")
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    if (begins or ends) and "|" in pattern and not _one_group(pattern):
        raise ValueError(f"{where}: anchors in a pattern with alternatives are not implemented")
    body = pattern[begins : len(pattern) - ends]
    escaped, i = "", 0
    while i < len(body):
        step = 2 if body[i] == "\\" else 1
        part = body[i : i + step]
        escaped += "\\/" if part == "/" else "\\n" if part == "\n" else part
        i += step
    return f"{'' if begins else '.*'}(?-s:{escaped}){'' if ends else '.*'}"


def _one_group(pattern: str) -> bool:
    """Whether all alternatives are inside groups."""
    depth, i = 0, 0
    while i < len(pattern):
        if pattern[i] == "\\":
            i += 1
        elif pattern[i] in "([":
            depth += 1
        elif pattern[i] in ")]":
            depth -= 1
        elif pattern[i] == "|" and not depth:
            return False
        i += 1
    return True
