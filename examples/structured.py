"""Gets answers in a form that the program defines (needs pydantic): python examples/structured.py [IMAGE]"""

import os
import sys
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel

import saccade

Color = Literal["red", "green", "blue", "yellow", "purple", "orange"]


class Shape(BaseModel):
    color: Color
    shape: Literal["circle", "square", "triangle", "cross"]
    place: str


class Scene(BaseModel):
    shapes: list[Shape]


image = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "demo" / "pictures" / "shapes.png"

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    scene = client.parse(
        "What does the picture show? Answer in JSON.",
        images=[image],
        response_format=Scene,
        max_tokens=256,
        temperature=0,
    )
    for shape in scene.shapes:
        print(f"{shape.place}: {shape.color} {shape.shape}")
    first = scene.shapes[0]
    answer = client.generate(
        f"What color is the shape at the {first.place}?",
        images=[image],
        response_format=get_args(Color),
        temperature=0,
    )
    print(answer.text)
