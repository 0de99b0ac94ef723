"""Picks the pictures that ship with the demo, and the questions about them, from held-out examples.

    python -m demo.showcase            # rewrites demo/pictures and demo/questions.json

`transformers` with `demo/model` answers each question greedily, and an example is taken only if every answer is right.
questions.json has the seed of each example, with which `held_out_example` draws the same picture again.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import NemotronH_Omni_Reasoning_V3

from demo import data, world
from demo.architecture import PATCH, patch_grid, pixel_values
from demo.evaluate import schema_of
from demo.json_questions import ATTRIBUTES, value_of
from demo.tokenizer import IMAGE_ID, render_user

HERE = Path(__file__).parent
SEEDS = range(1000)
"""Seeds to look through for each picture."""


class Oracle:
    """The exported model as `transformers` runs it, in fp32."""

    def __init__(self, path: Path) -> None:
        self.model = NemotronH_Omni_Reasoning_V3.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))

    @torch.no_grad()
    def answer(self, question: str, images: Sequence[Image.Image], max_tokens: int = 128) -> str:
        """The greedy answer to `question` about `images`, which come first."""
        ids: list[int] = []
        grids = [patch_grid(image.height, image.width) for image in images]
        tokens = (rows * columns // 4 for rows, columns in grids)
        prompt = render_user([*[None] * len(images), question])
        for token in self.tokenizer.encode(prompt, add_special_tokens=False).ids:
            ids += [token] * (next(tokens) if token == IMAGE_ID else 1)
        output = self.model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            pixel_values=torch.cat([_patches(image, grid) for image, grid in zip(images, grids, strict=True)]),
            image_grid_hw=torch.tensor(grids),
            max_new_tokens=max_tokens,
        )
        return self.tokenizer.decode(output[0, len(ids) :].tolist())


def _patches(image: Image.Image, grid: tuple[int, int]) -> torch.Tensor:
    """`[rows x columns, 3 x 8 x 8]`: the patches of `image` row by row, each channel by channel."""
    pixels = pixel_values([image], grid)[0].unflatten(2, (grid[1], PATCH)).unflatten(1, (grid[0], PATCH))
    return pixels.permute(1, 3, 0, 2, 4).reshape(grid[0] * grid[1], -1)


def held_out_example(name: str, seed: int) -> world.Example:
    """Candidate number `seed` for the picture called `name`."""
    rng = random.Random(f"showcase {name} {seed}")
    kinds: dict[str, Callable[[], world.Example]] = {
        "shapes": lambda: _with_json(data.scene_example(rng, 4, kind="caption", held_out=True)),
        "wide": lambda: data.scene_example(rng, 2, kind="where", held_out=True),
        "number": lambda: data.glyph_example(rng, kind="number"),
        "handwritten": lambda: data.glyph_example(rng, kind="handwritten", held_out=True),
        "pair": lambda: data.pair_example(rng, 1, kind="pair_same", held_out=True),
        "same": lambda: data.pair_example(rng, 2, kind="pair_what", held_out=True),
    }
    return kinds[name]()


def _with_json(example: world.Example) -> world.Example:
    """`example` with a question for JSON in place of its last one."""
    shapes = [{key: value_of(thing, key) for key in ATTRIBUTES} for thing in example.pictures[0].things]
    turn = world.Turn("json_picture", "Describe the picture in JSON.", json.dumps({"shapes": shapes}))
    return world.Example(example.pictures, (*example.turns[:-1], turn))


def _suits(name: str, example: world.Example) -> bool:
    """Whether `example` has what the shipped picture called `name` is meant to show."""
    image = example.pictures[0].image
    things = example.pictures[0].things
    if name == "shapes":
        return len(things) == 3 and min(image.size) >= 128 and len({turn.kind for turn in example.turns}) >= 4
    if name == "wide":
        return len(things) >= 2 and image.width >= 1.6 * image.height
    if name == "number":
        return len(things) == 4 and min(image.size) >= 96
    if name == "handwritten":
        return min(image.size) >= 96
    return min(min(picture.image.size) for picture in example.pictures) >= 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    arguments = parser.parse_args()
    oracle = Oracle(arguments.model)
    folder = HERE / "pictures"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    questions = []
    for name in ("shapes", "wide", "number", "handwritten", "pair", "same"):
        for seed in SEEDS:
            example = held_out_example(name, seed)
            images = [picture.image for picture in example.pictures]
            if _suits(name, example) and all(oracle.answer(t.question, images) == t.answer for t in example.turns):
                break
        else:
            raise SystemExit(f"none of {len(SEEDS)} seeds for {name!r} gives an example with only right answers")
        files = [f"{name}.png"] if len(images) == 1 else [f"{name}-first.png", f"{name}-second.png"]
        for file, image in zip(files, images, strict=True):
            image.save(folder / file, optimize=True)
        for turn in example.turns:
            question = {"images": files, "question": turn.question, "answer": turn.answer, "seed": seed}
            if turn.kind.startswith("json"):
                question["response_format"] = schema_of(json.loads(turn.answer))
            questions.append(question)
            print(f"{', '.join(files)}: {turn.question} {turn.answer}")
    (HERE / "questions.json").write_text(json.dumps(questions, indent=2) + "\n")


if __name__ == "__main__":
    main()
