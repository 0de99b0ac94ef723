"""Random JSON schemas that structured output supports, and schemas like those of real applications."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

PATTERNS = ["^[a-c]{1,4}$", "^\\d{3}-\\d{2}$", "^(x|yz)+$", "^[A-Z][a-z]{0,5}$", "^\\w{2,4}$", "^#[0-9a-f]{6}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname"]
NAMES = ["id", "name", "size", "tags", "when", "été", "a b", "x-1", "$v", "note"]
VALUES: list[Any] = [None, True, False, 0, -3, 7.5, "", "a", "é\n", 'q"\\', "😀"]


def random_schema(rng: random.Random) -> Schema:
    """A schema with a few levels, from all kinds of supported keywords, including `$ref`s into `$defs`."""
    maker = _Maker(rng)
    schema = maker.schema(rng.randrange(1, 4))
    return {**schema, "$defs": maker.definitions} if maker.definitions else schema


class _Maker:
    """One schema while it is made."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.definitions: dict[str, Schema] = {}

    def schema(self, depth: int) -> Schema:
        rng = self._rng
        leaves = [self._string, self._number, self._integer, self._constant, self._plain]
        inner = [self._object, self._object, self._array, self._tuple, self._any_of, self._reference, self._recursive]
        if depth == 0 or rng.random() < 0.15:
            return rng.choice(leaves)()
        return rng.choice(inner)(depth - 1)

    def _plain(self) -> Schema:
        kinds = self._rng.sample(["null", "boolean", "integer", "string"], self._rng.randrange(1, 3))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "description": "one of several kinds"}

    def _constant(self) -> Schema:
        if self._rng.random() < 0.3:
            return {"const": self._rng.choice([*VALUES, [1, "b"], {"k": [None]}])}
        return {"enum": self._rng.sample(VALUES, self._rng.randrange(1, 5))}

    def _string(self) -> Schema:
        match self._rng.randrange(4):
            case 0:
                return {"type": "string", "pattern": self._rng.choice(PATTERNS)}
            case 1:
                return {"type": "string", "format": self._rng.choice(FORMATS)}
            case 2:
                least = self._rng.randrange(4)
                return {"type": "string", "minLength": least, "maxLength": least + self._rng.randrange(8)}
        return {"type": "string"}

    def _bounds(self, number: Any) -> Schema:
        low = number()
        high = low + abs(number()) + 1
        made: Schema = {}
        if self._rng.random() < 0.7:
            made[self._rng.choice(["minimum", "exclusiveMinimum"])] = low
        if self._rng.random() < 0.7:
            made[self._rng.choice(["maximum", "exclusiveMaximum"])] = high
        return made

    def _integer(self) -> Schema:
        if self._rng.random() < 0.2:
            return {"type": "integer", "multipleOf": self._rng.choice([2, 5, 7, 100])}
        bounds = self._bounds(lambda: self._rng.randrange(-2000, 2000))
        return {"type": "integer", **{key: value + (key == "exclusiveMaximum") for key, value in bounds.items()}}

    def _number(self) -> Schema:
        return {"type": "number", **self._bounds(lambda: round(self._rng.uniform(-99, 99), self._rng.randrange(4)))}

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(NAMES, rng.randrange(0, 5))
        made: Schema = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        if names and rng.random() < 0.8:
            made["required"] = rng.sample(names, rng.randrange(1, len(names) + 1))
        if rng.random() < 0.7:
            made["additionalProperties"] = rng.choice([False, False, self.schema(0)])
        return made

    def _array(self, depth: int) -> Schema:
        made: Schema = {"type": "array", "items": self.schema(depth)}
        if self._rng.random() < 0.6:
            made["minItems"] = self._rng.randrange(3)
        if self._rng.random() < 0.8:
            made["maxItems"] = made.get("minItems", 0) + self._rng.randrange(4)
        return made

    def _tuple(self, depth: int) -> Schema:
        items = [self.schema(depth) for _ in range(self._rng.randrange(1, 4))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": self._rng.randrange(len(items) + 1)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth) for _ in range(self._rng.randrange(1, 4))]}

    def _reference(self, depth: int) -> Schema:
        if not self.definitions or self._rng.random() < 0.6:
            made = self.schema(depth)
            self.definitions[f"d{len(self.definitions)}"] = made
        return {"$ref": f"#/$defs/{self._rng.choice(sorted(self.definitions))}"}

    def _recursive(self, depth: int) -> Schema:
        name = f"r{len(self.definitions)}"
        self.definitions[name] = {}
        child = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 2}
        self.definitions[name] = {
            "type": "object", "properties": {"v": self.schema(0), "c": child}, "required": ["v"],
            "additionalProperties": False,
        }  # fmt: skip
        return {"$ref": f"#/$defs/{name}"}


def common_schema(rng: random.Random) -> Schema:
    """A flat or twice nested record with described fields, enums and a list of records, as applications use them."""
    fields: list[tuple[str, Schema]] = [
        ("title", {"type": "string", "description": "A short title"}),
        ("summary", {"type": "string", "maxLength": 400}),
        ("category", {"type": "string", "enum": [f"category_{i}" for i in range(rng.randrange(2, 40))]}),
        ("confidence", {"type": "number", "minimum": 0, "maximum": 1}),
        ("count", {"type": "integer", "minimum": 0}),
        ("created", {"type": "string", "format": "date-time"}),
        ("active", {"type": "boolean"}),
        ("email", {"type": ["string", "null"]}),
        ("tags", {"type": "array", "items": {"type": "string"}, "maxItems": rng.randrange(1, 12)}),
    ]

    def record(level: int) -> Schema:
        chosen = dict(rng.sample(fields, rng.randrange(2, len(fields) + 1)))
        for number in range(rng.randrange(0, 3) if level else 0):
            chosen[f"items_{number}"] = {"type": "array", "items": record(level - 1)}
        names = list(chosen)
        return {
            "type": "object", "properties": chosen, "required": rng.sample(names, rng.randrange(1, len(names) + 1)),
            "additionalProperties": False,
        }  # fmt: skip

    return record(2)
