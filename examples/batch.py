"""Writes a file with a request for each image and answers it as a batch: python examples/batch.py [QUESTION IMAGE...]

All images must be in one folder; the files of requests and answers are written there. If the program is interrupted,
start it again: it continues. Without arguments it asks about copies of the shipped images, in a temporary folder.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import saccade

IMAGES = Path(__file__).resolve().parents[1] / "demo" / "pictures"

arguments = sys.argv[1:]
if not arguments:
    copies = shutil.copytree(IMAGES, Path(tempfile.mkdtemp()) / "images")
    arguments = ["What does the picture show?", *map(str, sorted(copies.glob("*.png")))]
if len(arguments) < 2:
    sys.exit(__doc__)
question, *images = arguments
folder = Path(images[0]).parent

with open(folder / "requests.jsonl", "w") as file:
    for image in images:
        content = [
            {"type": "image_url", "image_url": {"url": Path(image).name}},
            {"type": "text", "text": question},
        ]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
        file.write(json.dumps({"custom_id": Path(image).name, "body": body}) + "\n")

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    summary = client.run_batch(folder / "requests.jsonl", folder / "answers.jsonl", ordered=True)
    print(f"{summary.completed} of {summary.total} answered, {summary.completion_tokens} tokens")

for line in open(folder / "answers.jsonl"):
    row = json.loads(line)
    text = row["error"]["message"] if row["error"] else row["response"]["body"]["choices"][0]["message"]["content"]
    print(f"{row['custom_id']}: {text}")
