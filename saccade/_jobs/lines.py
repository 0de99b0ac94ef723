"""The lines of a job's output, in OpenAI's batch format."""

from __future__ import annotations

import json
from typing import Any

from saccade._openai.answers import completion
from saccade._openai.errors import in_words, status_code
from saccade._openai.fields import CHAT, Rules
from saccade.errors import SaccadeError
from saccade.types import Generation


def output_line(row_id: str, custom_id: str, result: Generation | SaccadeError, fields: Rules = CHAT) -> bytes:
    """The line for one answer or error, with its newline. `fields`: rules for the names of the row's fields."""
    if isinstance(result, SaccadeError):
        error = {"code": result.reason or type(result).__name__, "message": in_words(result, fields)}
        response: dict[str, Any] = {
            "status_code": status_code(result),
            "request_id": result.request_id,
            "body": {"error": {**error, "type": type(result).__name__}},
        }
    else:
        error = None
        response = {"status_code": 200, "request_id": result.request_id, "body": completion(result)}
    row = {"id": row_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
