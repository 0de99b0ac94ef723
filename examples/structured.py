"""Answers in a form that the program gives (needs pydantic): python examples/structured.py [IMAGE]"""

import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

import saccade


class Shape(BaseModel):
    color: Literal["red", "green", "blue", "yellow", "purple", "orange"]
    shape: Literal["circle", "square", "triangle", "cross"]
    place: str


class Picture(BaseModel):
    shapes: list[Shape]


image = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "demo" / "pictures" / "shapes.png"

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    picture = client.parse(
        "Describe the picture in JSON.", images=[image], response_format=Picture, max_tokens=256, temperature=0
    )
    for shape in picture.shapes:
        print(f"{shape.place}: {shape.color} {shape.shape}")
    first = picture.shapes[0]
    answer = client.generate(
        f"What color is the shape at the {first.place}?",
        images=[image],
        response_format=["red", "green", "blue", "something else"],
        temperature=0,
    )
    print(answer.text)
