"""The interface between model families and the reader of GGUF files, llama.cpp's format of one file with metadata,
tokenizer and weights.

A family's `gguf.py` undoes what llama.cpp's converter (`convert_hf_to_gguf.py`) does to a published checkpoint: it says
which JSON files the checkpoint has, and from which tensors of the file each of its weights is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from families.fields import MOST_LAYERS
from families.files import CheckpointError

if TYPE_CHECKING:
    from families.gguf_weights import Inverse, Make, Names

_WHOLE = ("general.", "tokenizer.", "split.")
"""Beginnings of keys that are not about one architecture."""


class Metadata:
    """The key-value pairs of a file, each checked when it is read. Names are without the architecture that precedes
    them in the file. Raises CheckpointError naming the file, the key and its value."""

    def __init__(self, values: Mapping[str, Any], architecture: str, file: str) -> None:
        """`values`: numbers, strings, booleans, and lists of them."""
        self.values, self.architecture, self.file = values, architecture, file

    def key(self, name: str) -> str:
        """The key in the file."""
        return name if name.startswith(_WHOLE) else f"{self.architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.values

    def _value(self, name: str, default: Any) -> Any:
        found = self.values.get(self.key(name), default)
        if found is None:
            raise CheckpointError(f"{self.file}: the key {self.key(name)} is missing")
        return found

    def _wrong(self, name: str, wanted: str, found: object) -> CheckpointError:
        shown = repr(found)
        shown = shown if len(shown) <= 100 else f"{shown[:100]}... ({len(shown)} characters)"
        return CheckpointError(f"{self.file}: {self.key(name)} must be {wanted}, not {shown}")

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**40) -> int:
        """A whole number from `least` to `most`."""
        found = self._value(name, default)
        if type(found) is not int or not least <= found <= most:
            raise self._wrong(name, f"a whole number from {least} to {most}", found)
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        found = self._value(name, default)
        if type(found) not in (int, float):
            raise self._wrong(name, "a number", found)
        return float(found)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        found = self._value(name, default)
        if type(found) is not bool:
            raise self._wrong(name, "true or false", found)
        return found

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        found = self._value(name, default)
        if type(found) is not str:
            raise self._wrong(name, "a string", found)
        return found

    def listed(self, name: str, kind: type, length: int | None = None, default: list[Any] | None = None) -> list[Any]:
        """A list whose entries are of a kind: int, float, bool or str. `length`: the number of its entries."""
        found = self._value(name, default)
        words = {int: "whole numbers", float: "numbers", bool: "booleans", str: "strings"}[kind]
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(found, list) or any(type(entry) not in kinds for entry in found):
            raise self._wrong(name, f"a list of {words}", found)
        if length is not None and len(found) != length:
            raise CheckpointError(f"{self.file}: {self.key(name)} has {len(found)} entries, not {length}")
        return found

    def by_layer(self, name: str, layers: int) -> list[int]:
        """A whole number for each layer: a list, or one number for all layers."""
        found = self._value(name, None)
        return [self.count(name, least=0)] * layers if type(found) is int else self.listed(name, int, layers)

    def in_layers(self, name: str, layers: int) -> int:
        """The only whole number above 0 in `by_layer`: layers of another kind have 0."""
        found = sorted({count for count in self.by_layer(name, layers) if count})
        if len(found) != 1 or found[0] < 0:
            raise self._wrong(name, "one number above 0, the same in all layers that have one", found)
        return found[0]

    def only(self, name: str, served: object) -> None:
        """Raises CheckpointError if a key is there with another value than the one that is served."""
        if (found := self.values.get(self.key(name), served)) != served:
            raise CheckpointError(f"{self.file}: {self.key(name)} is {found!r}; this model is served with {served!r}")


@dataclass(frozen=True)
class GgufModel:
    """What a family is told about a file and, for a vision-language model, the file of its tower (`mmproj`)."""

    metadata: Metadata
    shapes: Mapping[str, tuple[int, ...]]
    """Name -> shape of each tensor of both files, outputs before inputs as in torch."""
    tokens: Sequence[str] = ()
    """The vocabulary, by id."""
    tower: Metadata | None = None
    """The metadata of the tower's file; its architecture is `clip`."""
    defaults: list[str] = field(default_factory=list, compare=False)
    """Settings that the file does not have, for which the family's released values are used; a family adds to it."""

    @cached_property
    def layers(self) -> int:
        """Number of published layers, without those of multi-token prediction heads."""
        return self.metadata.count("block_count", most=MOST_LAYERS) - self.heads

    @property
    def heads(self) -> int:
        """Number of multi-token prediction heads, each a layer after the others."""
        return self.metadata.count("nextn_predict_layers", 0, least=0, most=MOST_LAYERS - 1)

    @property
    def tied(self) -> bool:
        """Whether the table of embeddings is the vocabulary projection."""
        return "output.weight" not in self.shapes

    @property
    def vocab_size(self) -> int:
        return self.shape("token_embd.weight", 2)[0]

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """The shape of a tensor that has to be there. Raises CheckpointError."""
        found = self.shapes.get(name)
        if found is None:
            raise CheckpointError(f"{self.metadata.file}: the tensor {name} is missing")
        if len(found) != dims:
            raise CheckpointError(f"{self.metadata.file}: {name} has shape {list(found)}, not {dims} dimensions")
        return found

    def has(self, name: str) -> bool:
        """Whether any layer has a tensor of this name, such as `attn_q.bias`."""
        return any(f"blk.{index}.{name}" in self.shapes for index in range(self.layers))

    def token(self, text: str) -> int:
        """The id of a token that has to be there. Raises CheckpointError."""
        if text not in self.tokens:
            raise CheckpointError(f"{self.metadata.file}: its vocabulary of {len(self.tokens)} tokens lacks {text!r}")
        return self.tokens.index(text)


class Made(NamedTuple):
    """A weight of the published checkpoint, and how it is made."""

    name: str
    sources: tuple[str, ...]
    """Names of the tensors in the file. If one is missing, the weight is left out."""
    make: Make | None = None
    """Makes the weight from those tensors; None: there is one, which is the weight."""
    inverse: Inverse | None = None
    """The change of numbers that is undone, before `make`; None: numbers are unchanged."""
    moved: int = 0
    """How many neighbouring inputs `make` keeps together; 0 if it moves none. In a quantised weight, groups must divide
    this number."""


@dataclass(frozen=True)
class Layout:
    """How the models of one architecture are stored."""

    architecture: str
    """`general.architecture` of the file."""
    files: Callable[[GgufModel], dict[str, dict[str, Any]]]
    """The JSON files of the published checkpoint, by name, except those of the tokenizer. Raises CheckpointError."""
    weights: Callable[[GgufModel], Iterator[Made]]
    """The weights of the published checkpoint that may be there."""
    projector: str = ""
    """`clip.projector_type` of the tower's file; empty: there is none."""
    unused: Callable[[GgufModel, str], bool] = lambda model, name: False
    """Whether a tensor has no meaning for this server."""


def renamed(model: GgufModel, theirs: str, ours: str, names: Names) -> Iterator[Made]:
    """The weights of one layer, those that are there. `theirs`, `ours`: what precedes the names; `names`: name in the
    file -> published name, or that, the change of numbers and what makes the weight."""
    for name, found in names.items():
        if theirs + name in model.shapes:
            new, inverse, make = (found, None, None) if isinstance(found, str) else found
            yield Made(ours + new, (theirs + name,), make, inverse)


def linear(theirs: str, ours: str) -> dict[str, str]:
    """Names of a linear layer or a norm, whose bias may be missing, for `renamed`."""
    return {f"{theirs}.{part}": f"{ours}.{part}" for part in ("weight", "bias")}
