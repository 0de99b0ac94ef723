"""Asks about a video: python examples/video.py [VIDEO] [QUESTION]

VIDEO is a GIF, APNG, WebP, AVIF, MP4 or WebM file. Without one, the video is a list of images: a square that moves to
the right.
"""

import os
import sys

from PIL import Image, ImageDraw

import saccade

*clips, question = sys.argv[1:] or ["What does the picture show?"]


def frame(left: int) -> Image.Image:
    image = Image.new("RGB", (96, 64), "white")
    ImageDraw.Draw(image).rectangle((left, 20, left + 24, 44), fill="red")
    return image


videos = clips or [saccade.Video([frame(left) for left in range(0, 72, 12)], fps=2)]

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    answer = client.generate(question, videos=videos, temperature=0, max_tokens=60)
    print(answer.text)
    print(f"({answer.usage.video_frames} frames, {answer.usage.video_tokens} tokens)")
