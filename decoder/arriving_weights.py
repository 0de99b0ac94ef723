"""Weights while a model is being built: each is freed when its layer is finished, so that few are in memory at a
time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sized
from typing import Any

from torch import Tensor

from decoder.config import DecoderConfig
from kernels.linear import Quantised, Stack

Arriving = Tensor | Quantised | Stack


class ArrivingWeights:
    """Named weights from an iterable; those of a `Stack` are read when their layer is built. An iterable without a
    length is read as weights are needed, and must be in the order of `DecoderConfig.expected_weights`; one with a
    length may have any order."""

    def __init__(self, config: DecoderConfig, weights: Iterable[tuple[str, Arriving]]) -> None:
        self._config, self._source = config, iter(weights)
        self._expected, self._optional = config.expected_weights(), config.optional_weights()
        self._places = {name: place for place, name in enumerate(self._expected)}
        self._held: dict[str, Arriving] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._place = -1
        if isinstance(weights, Sized):
            self._read_all()

    def take(self, names: Collection[str]) -> dict[str, Any]:
        """Returns those of these names that exist and removes them. `ValueError` lists all names of the whole model
        that are missing, unknown or of a wrong shape."""
        last = max((self._places[name] for name in names), default=-1)
        while self._place < last and self._read():
            pass
        found = {name: self._held.pop(name) for name in names if name in self._held}
        if any(name not in found and name not in self._optional for name in names):
            self._read_all()
            check_shapes(self._config, self._shapes)
        return found

    def finish(self) -> None:
        """Reads the remaining weights. Raises `ValueError` as in `take`, also for names that were never taken."""
        self._read_all()
        check_shapes(self._config, self._shapes)
        assert not self._held, f"weights that no layer took: {', '.join(self._held)}"

    def _read(self) -> bool:
        """Reads one more weight; False at the end. If it is unknown or has a wrong shape, reads the shapes of all
        others and raises a `ValueError` that lists every problem."""
        item = next(self._source, None)
        if item is None:
            return False
        name, tensor = item
        self._shapes[name] = tuple(tensor.shape)
        if self._expected.get(name) != tuple(tensor.shape):
            self._shapes |= {name: tuple(tensor.shape) for name, tensor in self._source}
            check_shapes(self._config, self._shapes)
        self._held[name] = tensor
        self._place = max(self._place, self._places[name])
        return True

    def _read_all(self) -> None:
        while self._read():
            pass
        self._place = len(self._places)


def check_shapes(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """`ValueError` that lists every name that is missing, unknown or of a wrong shape."""
    expected, optional = config.expected_weights(), config.optional_weights()
    problems = [f"missing {name}" for name in expected if name not in shapes and name not in optional]
    problems += [f"unknown {name}" for name in shapes if name not in expected]
    problems += [
        f"{name} has shape {shapes[name]}, not {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        raise ValueError(f"weights do not fit the decoder's configuration: {'; '.join(problems)}")
