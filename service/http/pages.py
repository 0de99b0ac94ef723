"""Lists of objects, a page at a time: its length, where it begins, and the form of the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from saccade.errors import InvalidArgument, NotFound
from service.http.call import HttpCall

Query: TypeAlias = dict[str, list[str]]
"""The values of each parameter of a request's query; none of the lists is empty."""


def query_of(call: HttpCall) -> Query:
    """The parameters in the query of a request; one without a value is left out."""
    return parse_qs(call.scope["query_string"].decode("latin-1"))


def limit_of(query: Query, default: int, most: int) -> int:
    """Largest number of objects on the page, from the parameter `limit`. Raises InvalidArgument."""
    text = query.get("limit", [str(default)])[0]
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= most:
        raise InvalidArgument(f"limit: expected a number from 1 to {most}, got {text[:40]!r}")
    return int(text)


def index_of(query: Query, name: str, ids: Sequence[str], kind: str, reason: str = "") -> int:
    """The index in `ids` of the id that the parameter `name` gives. Raises NotFound with `reason`; `kind`: what the
    ids are those of."""
    wanted = query[name][0]
    if wanted not in ids:
        raise NotFound(f"{name}: there is no {kind} {wanted[:200]!r}", reason=reason)
    return ids.index(wanted)


def page_around(
    objects: Sequence[dict[str, Any]], query: Query, default: int, most: int, kind: str, reason: str = ""
) -> dict[str, Any]:
    """A page of Anthropic's lists: at most `limit` of the objects (`default`, at most `most`), those after the id
    `after_id` or before `before_id`. `kind` and `reason`: see `index_of`. Raises InvalidArgument and NotFound."""
    limit = limit_of(query, default, most)
    if "after_id" in query and "before_id" in query:
        raise InvalidArgument("before_id: it cannot be combined with after_id")
    ids = [each["id"] for each in objects]
    if "after_id" in query:
        objects = objects[index_of(query, "after_id", ids, kind, reason) + 1 :]
    if "before_id" in query:
        objects = objects[: index_of(query, "before_id", ids, kind, reason)]
        return page_object(objects[-limit:], more=len(objects) > limit)
    return page_object(objects[:limit], more=len(objects) > limit)


def page_object(objects: Sequence[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """The answer with the `objects` of a page. `more`: there are further pages."""
    return {
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": more,
    }
