"""What a vision tower is to the rest of the encoder: its sizes before weights are read, and a forward pass.

R tower rows, T patches, N image tokens, D features of a position, P numbers in a patch, M patches under an image token.
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
"""auto: compiled code where the tower has it and the machine runs it; on: only so; off: torch operations."""


@dataclass(frozen=True)
class PackedBatch:
    """Device tensors of one packed launch; every size in it is known on the host."""

    patches_TP: Tensor
    positions_TD: Tensor
    source_R: Tensor
    """int64: what each tower row is. 0..K-1 a prefix token, K padding, K + 1 + t patch t."""
    cu_seqlens: Tensor
    """int32, from 0 to R."""
    token_rows_NM: Tensor
    """int64: the tower rows under each image token."""
    max_seqlen: int
    rotations_TF: Tensor | None = None
    """float32, of patches as `RotaryTower.rotations` gives them; None for towers without."""


class TowerSizes(Protocol):
    """The numbers of a tower that budgets, buffers, plans and checks follow from.

    Two more are read where a tower has them: `rotation_width` (`rotation_width` below) and `patch_order` (below too).
    """

    @property
    def num_prefix_tokens(self) -> int:
        """Tower rows of its own ahead of the patches of each attention sequence."""

    @property
    def merge_size(self) -> int:
        """Patches under an image token along each side."""

    @property
    def patches_per_token(self) -> int:
        """Patches under an image token."""

    @property
    def patch_widths(self) -> Mapping[str, int]:
        """Numbers in one flattened patch, for each kind of item that such a tower can take."""

    @property
    def position_width(self) -> int:
        """Features of what `Tower.positions` gives for each patch."""

    @property
    def row_width(self) -> int:
        """Width of the rows that the decoder gets."""

    @property
    def activation_width(self) -> int:
        """Numbers that a block holds at once for each tower row: an estimate for plans."""

    @property
    def min_image_tokens(self) -> int:
        """Tokens of the smallest image: `lo` of the budgets."""

    @property
    def max_image_tokens(self) -> int:
        """Tokens of the largest image that the image rule aims at: `hi` of the budgets by default."""


def rotation_width(sizes: TowerSizes) -> int:
    """Features of what `RotaryTower.rotations` gives for each patch; 0 for towers that rotate nothing."""
    return int(getattr(sizes, "rotation_width", 0))


def patch_order(sizes: TowerSizes) -> str:
    """The order of patches that a tower takes: row by row, unless it says otherwise."""
    return str(getattr(sizes, "patch_order", ROW_MAJOR))


class TowerSpec(TowerSizes, Protocol):
    """A tower before its weights are read."""

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight name that the tower can take, with its shape."""

    def optional_weights(self) -> frozenset[str]:
        """Those of them that a checkpoint may leave out."""

    def kinds(self, weights: Collection[str]) -> tuple[str, ...]:
        """Kinds of items that a tower with the weights of these names takes, of those in `patch_widths`."""

    def build(
        self, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> Tower:  # fmt: skip
        """The tower. `native`: one of `NATIVE_MODES`; `max_rows`: tower rows of the largest expected launch.

        Raises `ValueError` for missing weights, and where `native` is "on" and cannot be had.
        """


class Tower(Protocol):
    """A tower with its weights on a device. Used by one thread at a time."""

    @property
    def sizes(self) -> TowerSizes:
        """As its spec gave them."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and rows."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of items that it takes."""

    @property
    def scratch_bytes(self) -> int:
        """Memory that it keeps for itself between launches."""

    def positions(self, grid: Grid) -> Tensor:
        """`[gh * gw, position_width]` in its dtype, on its device, in the order of the patches; new memory."""

    def as_floats(self, patches: Tensor) -> Tensor:
        """uint8 patches `[T, P]` on its device as it takes them: normalised, in its dtype."""

    def forward(self, batch: PackedBatch, *, kind: str) -> Tensor:
        """`[N, row_width]` rows in its dtype, one per entry of `token_rows_NM`; new memory. A pure function."""

    def pieces(self, batch: PackedBatch, *, kind: str) -> Pieces[Tensor]:
        """`forward` as a generator that yields after each layer."""


@runtime_checkable
class RotaryTower(Protocol):
    """What a tower has besides where its `rotation_width` is not 0."""

    def rotations(self, grid: Grid) -> Tensor:
        """`[gh * gw, rotation_width]` float32, on its device, in the order of the patches: cosines of each pair of
        features of a head, then their sines; new memory."""
