"""Lets the model call a tool about an image and returns the results: python examples/tools.py [IMAGE [REQUEST]]"""

import json
import os
import sys
from pathlib import Path

import saccade

TOOL = {
    "type": "function",
    "function": {
        "name": "record_shape",
        "description": "Records a shape.",
        "parameters": {
            "type": "object",
            "properties": {"color": {"type": "string"}, "shape": {"type": "string"}, "place": {"type": "string"}},
            "required": ["color", "shape", "place"],
        },
    },
}

image = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "demo" / "pictures" / "shapes.png"
request = sys.argv[2] if len(sys.argv) > 2 else "Record the shape at the top."
recorded = []

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    question = [{"type": "image", "image": image}, {"type": "text", "text": request}]
    messages = [{"role": "user", "content": question}]
    answer = client.chat(messages, tools=[TOOL], temperature=0)
    messages.append(answer.message)
    for call in answer.tool_calls:
        print(f"{call.name}: {call.arguments}")
        recorded.append(json.loads(call.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{len(recorded)} recorded"})
    print(client.chat(messages, tools=[TOOL], temperature=0).text)
