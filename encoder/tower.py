"""The interface of a vision tower: its sizes, known before weights are read, and its forward pass.

R tower rows, T patches, N image tokens, D features of a position, P values in a patch, M patches under an image token,
K taps of a convolution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from encoder.item import ROW_MAJOR, Grid
from encoder.pieces import Pieces

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernels.linear import AnyWeight

NATIVE_MODES = ("auto", "on", "off")
"""auto: compiled code where the tower and the machine support it; on: compiled code or an error; off: torch
operations."""


@dataclass(frozen=True)
class PackedBatch:
    """Device tensors of one packed launch; their sizes are known on the host."""

    patches_TP: Tensor
    positions_TD: Tensor
    source_R: Tensor
    """int64: source of each tower row. 0..K-1 a prefix token, K padding, K + 1 + t patch t."""
    cu_seqlens: Tensor
    """int32, from 0 to R."""
    token_rows_NM: Tensor
    """int64: the tower rows under each image token."""
    max_seqlen: int
    rotations_TF: Tensor | None = None
    """float32 rotations of the patches, from `RotaryTower.rotations`; None for towers without."""
    neighbours_RK: Tensor | None = None
    """int32: the tower row under each tap of a convolution over the grid of the row's sequence, tap by tap and row by
    row, and -1 beyond the grid's edge; None for towers without."""


class TowerSizes(Protocol):
    """Sizes of a tower, from which budgets, buffers, plans and checks follow.

    Three more are optional; the functions `rotation_width`, `conv_side` and `patch_order` below read them.
    """

    @property
    def num_prefix_tokens(self) -> int:
        """Tower rows before the patches of each attention sequence."""

    @property
    def merge_size(self) -> int:
        """Patches per image token along each side."""

    @property
    def patches_per_token(self) -> int:
        """Patches per image token."""

    @property
    def patch_widths(self) -> Mapping[str, int]:
        """Values in one flattened patch, for each kind of item that the tower can take."""

    @property
    def position_width(self) -> int:
        """Width of the output of `Tower.positions`."""

    @property
    def row_width(self) -> int:
        """Width of the rows that the decoder gets."""

    @property
    def activation_width(self) -> int:
        """Estimate of the values that a block holds at once per tower row, for plans."""

    @property
    def min_image_tokens(self) -> int:
        """Tokens of the smallest image."""

    @property
    def least_budget(self) -> int:
        """The default `lo` of the budgets, at most the tokens of the smallest image."""

    @property
    def max_image_tokens(self) -> int:
        """Tokens of the largest image that the image rule aims at; the default `hi` of the budgets."""


def rotation_width(sizes: TowerSizes) -> int:
    """Width of the output of `RotaryTower.rotations`; 0 for towers without rotations."""
    return int(getattr(sizes, "rotation_width", 0))


def conv_side(sizes: TowerSizes) -> int:
    """Taps along each side of the convolutions over the grid of patches, an odd number; 0 for towers without."""
    return int(getattr(sizes, "conv_side", 0))


def patch_order(sizes: TowerSizes) -> str:
    """The order of patches that a tower takes: row by row unless the tower says otherwise."""
    return str(getattr(sizes, "patch_order", ROW_MAJOR))


class TowerSpec(TowerSizes, Protocol):
    """A tower before its weights are read."""

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight that the tower can take."""

    def optional_weights(self) -> frozenset[str]:
        """Names of the weights that a checkpoint may omit."""

    def kinds(self, weights: Collection[str]) -> tuple[str, ...]:
        """The kinds of items, of those in `patch_widths`, that a tower with these weights takes."""

    def build(
        self, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> Tower:  # fmt: skip
        """Builds the tower. `native`: one of `NATIVE_MODES`; `max_rows`: tower rows of the largest expected launch.

        Raises `ValueError` for missing weights, and if `native` is "on" and compiled code is not available.
        """


class Tower(Protocol):
    """A tower with its weights on a device. Used by one thread at a time."""

    @property
    def sizes(self) -> TowerSizes:
        """The sizes that its spec gave."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, activations and rows."""

    @property
    def device(self) -> torch.device:
        """Device of the weights and activations."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of items that the tower takes."""

    def positions(self, grid: Grid) -> Tensor:
        """`[gh * gw, position_width]` in the tower's dtype on its device, in the order of the patches; new memory."""

    def as_floats(self, patches: Tensor, *, kind: str) -> Tensor:
        """Normalises uint8 patches `[T, P]` of a `kind` of item on the tower's device, to its dtype."""

    def pieces(self, batch: PackedBatch, *, kind: str) -> Pieces[Tensor]:
        """The forward pass, a pure function, as a generator that yields after each layer. Returns `[N, row_width]` rows
        in the tower's dtype, one per entry of `token_rows_NM`; new memory."""


@runtime_checkable
class RotaryTower(Protocol):
    """Further method of a tower whose `rotation_width` is not 0."""

    def rotations(self, grid: Grid) -> Tensor:
        """`[gh * gw, rotation_width]` float32 on the tower's device, in the order of the patches: cosines for each pair
        of features of a head, then the sines; new memory."""
