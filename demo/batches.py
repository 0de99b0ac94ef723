"""The batches of one training step of the demo model: how many questions of each kind, and sizes of pictures."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

from demo import data, drawing, questions, world
from demo.architecture import patch_grid
from demo.conversations import Batch, Renderer
from demo.json_questions import with_json
from demo.tool_questions import tool_example

SCENES, SCENE_TURNS = 8, 4
GLYPHS = 10
PAIRS, PAIR_TURNS = 12, 3
TOOLS = 10
JSON_SHARE = 0.3
"""Share of the questions without tools that ask for JSON."""
SHEETS = 4
"""Practice sheets per step: pictures for the auxiliary loss only."""
SMALL_SIDE = 104
"""Most batches have only pictures with sides of at most this many pixels, because they cost less; the share of these
batches decreases towards the end of the training."""


class Generator:
    """Draws training batches. The pictures of a batch share one patch grid, so that the encoder needs no padding."""

    def __init__(self, renderer: Renderer, seed: int, scale: float = 1.0) -> None:
        """`scale`: factor of the number of conversations in a step."""
        self.renderer, self.scale = renderer, scale
        self.rng = random.Random(seed)
        self.progress = 0.0
        """Completed share of the training, 0 to 1; set by the training run."""
        self.sizes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for _ in range(20_000):
            size = data.any_size(self.rng)
            self.sizes[patch_grid(*size)].append(size)

    def _one_grid(self) -> data.Sizes:
        """A source of picture sizes that all have the patch grid of one size drawn by `any_size`."""
        small = self.rng.random() < (0.8 if self.progress < 0.8 else 0.3)
        size = data.any_size(self.rng)
        while small and max(size) > SMALL_SIDE:
            size = data.any_size(self.rng)
        sizes = self.sizes[patch_grid(*size)] or [size]  # no size drawn in __init__ has this grid
        return lambda rng: rng.choice(sizes)

    def step(self) -> Iterator[Batch]:
        """The batches of one optimiser step: shapes twice, digits, pairs, tools and sometimes small talk."""
        rng = self.rng
        for _ in range(2):
            sizes = self._one_grid()
            yield self._batch([data.scene_example(rng, SCENE_TURNS, sizes=sizes) for _ in self._some(SCENES)])
        sizes = self._one_grid()
        yield self._batch([data.glyph_example(rng, sizes=sizes) for _ in self._some(GLYPHS)])
        sizes = self._one_grid()
        yield self._batch([data.pair_example(rng, PAIR_TURNS, sizes=sizes) for _ in self._some(PAIRS)])
        sizes = self._one_grid()
        yield self._batch([tool_example(rng, sizes=sizes) for _ in self._some(TOOLS)])
        if rng.random() < 0.05:
            turns = [world.Turn("chat", *rng.choice(questions.CHAT)) for _ in range(8)]
            yield self._batch([world.Example((), (turn,)) for turn in turns])

    def _some(self, number: int) -> range:
        return range(max(1, round(number * self.scale)))

    def sheets(self) -> list[world.Picture]:
        """The practice sheets of one optimiser step."""
        sizes = self._one_grid()
        return [drawing.practice_sheet(self.rng, sizes(self.rng)) for _ in range(SHEETS)]

    def _batch(self, examples: Sequence[world.Example]) -> Batch:
        mixed = [example if example.tools else with_json(self.rng, example, JSON_SHARE) for example in examples]
        return self.renderer.collate([self.renderer.render(example, self.rng) for example in mixed])
