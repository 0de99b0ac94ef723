"""The reference of the HTTP API, from the server's OpenAPI document."""

from __future__ import annotations

from typing import Any


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(part) for part in schema[key] if part.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return " or ".join(part for part in kind if part != "null") if isinstance(kind, list) else str(kind)


def _limits(schema: dict[str, Any]) -> str:
    """The bounds of a value, including those of a value that may also be null."""
    parts = [schema, *schema.get("anyOf", [])]
    words = {
        "minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below",
        "minLength": "characters, at least", "maxLength": "characters, at most",
        "minItems": "entries, at least", "maxItems": "entries, at most",
    }  # fmt: skip
    return "; ".join(f"{words[key]} {part[key]}" for part in parts for key in words if key in part)


def _model(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f"### {name}", ""]
    if text := schema.get("description"):
        lines += [" ".join(text.split()), ""]
    required = set(schema.get("required", ()))
    lines += ["| field | type | default | |", "| --- | --- | --- | --- |"]
    for field, part in schema.get("properties", {}).items():
        default = part.get("default")
        shown = "required" if field in required else "" if default is None else f"`{default}`"
        text = ". ".join(filter(None, (" ".join(part.get("description", "").split()).rstrip("."), _limits(part))))
        kind = _type(part)
        lines.append(f"| `{field}` | {kind} | {shown} | {text} |".replace("|  |", "| |"))
    return [*lines, ""]


def http_reference() -> str:
    """Tables of all routes and of the schemas of their bodies."""
    from service.http import openapi
    from service.http.app import described_routes

    routes = described_routes()
    schemas = openapi.document(routes)["components"]["schemas"]
    lines = ["## Routes", "", "| method | path | | body |", "| --- | --- | --- | --- |"]
    for method, path, summary in routes:
        body = openapi.BODIES.get(path) if method == "POST" else None
        name = body.__name__ if body else ""
        link = f"[{name}](#{name.lower()})" if name else ""
        lines.append(f"| {method} | `{path.replace(':path', '')}` | {summary} | {link} |")
    lines += ["", "## Bodies", ""]
    for name, schema in sorted(schemas.items()):
        if name != "Error" and schema.get("type") == "object":
            lines += _model(name, schema)
    return "\n".join(lines)
