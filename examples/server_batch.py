"""A batch that the server processes in the background: python examples/server_batch.py [QUESTION IMAGE...]

The program uploads the images and the file of requests, and follows the batch. It could also end after the upload: the
server continues, and any client with the batch's id can get the answers. Without arguments it asks about all shipped
images.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import saccade

IMAGES = Path(__file__).resolve().parents[1] / "demo" / "pictures"

arguments = sys.argv[1:] or ["What does the picture show?", *map(str, sorted(IMAGES.glob("*.png")))]
if len(arguments) < 2:
    sys.exit(__doc__)
question, *images = arguments

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    lines = []
    for image in images:
        media = client.media.upload(image)
        content = [
            {"type": "image_url", "image_url": {"url": f"media:{media.media_id}"}},
            {"type": "text", "text": question},
        ]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
        lines.append(json.dumps({"custom_id": os.path.basename(image), "body": body}))
    batch = client.batches.create("\n".join(lines).encode(), ordered=True)
    for now in client.batches.watch(batch.batch_id):
        print(f"{now.state}: {now.completed} of {now.total}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        for line in open(client.batches.download(batch.batch_id, f"{folder}/out.jsonl")):
            row = json.loads(line)
            print(f"{row['custom_id']}: {row['response']['body']['choices'][0]['message']['content']}")
    client.batches.delete(batch.batch_id)
