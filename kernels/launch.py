"""Launches Triton kernels, and records launches without a GPU.

Every `kernel.py` starts its kernels through `launch`. Inside `recording` nothing runs: operations are called with
tensors on torch's "meta" device, and their launches are recorded for `kernels.aot`, which compiles them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")

ARCHITECTURES = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
"""Architectures that the tables of configurations have rows for. A block has 99 KiB of shared memory on sm_86, and on
sm_89 and sm_120 too; where the row of sm_80 fits in that, tables have none of sm_86."""


MOST_PROGRAMS = 65535
"""Programs of a grid along its second and third axes: a limit of GPUs."""
OF_ROWS = [
    "p_slots", "p_batch_slots", "p_targets", "p_accepted", "p_counts", "p_lengths", "p_tables", "p_starts", "p_places",
]  # fmt: skip
"""Arguments with a number for each row. They may be parts of one tensor and have any alignment; compiling for each
alignment would stall the steps that meet a new one."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel (a `triton.jit` function) with keyword arguments, options such as num_warps included."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


@dataclass
class _Recorder:
    architecture: str
    launches: list[Launch]


_recorder: _Recorder | None = None
_logged: set[str] = set()


@contextmanager
def recording(architecture: str) -> Iterator[list[Launch]]:
    """Collects launches instead of running them; configurations are those of `architecture`."""
    global _recorder
    assert _recorder is None, "already recording"
    _recorder = _Recorder(architecture, [])
    try:
        yield _recorder.launches
    finally:
        _recorder = None


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Runs `kernel[grid](**arguments)` on the device of the first tensor; does nothing for an empty grid. Raises
    `ValueError` for a grid that no GPU launches."""
    if 0 in grid:
        return
    if max(grid[1:], default=0) > MOST_PROGRAMS:
        raise ValueError(
            f"{kernel.__name__} would need {max(grid[1:])} programs along one axis, and a GPU launches at most "
            f"{MOST_PROGRAMS}: a step has too many tokens"
        )
    if _recorder is not None:
        _recorder.launches.append(Launch(kernel, grid, arguments))
        return
    device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
    # Triton launches on the thread's current device, by default the first GPU, wherever the tensors are.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](**arguments)


def architecture(device: torch.device) -> str:
    """`sm_90`, `gfx942`, ...; `sm_90` for a CPU (Triton's interpreter)."""
    if _recorder is not None:
        return _recorder.architecture
    if device.type != "cuda":
        return "sm_90"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def by_architecture(table: Mapping[str, T], device: torch.device) -> T:
    """The row of a table of configurations; for sm_86 that of sm_80, unless the table has its own. An unknown device
    gets the row of its vendor that needs the least shared memory, with one warning; a device with less than that fails
    at the launch."""
    row = name = architecture(device)
    if name not in ARCHITECTURES:
        row = "gfx942" if name.startswith("gfx") else "sm_86"
        if name not in _logged:
            _logged.add(name)
            log.warning("kernels have no configurations for %s and use those of %s", name, row)
    return table["sm_80"] if row == "sm_86" and row not in table else table[row]


def one_instruction(device: torch.device) -> dict[str, int]:
    """Options of a launch with which every tile of a product uses the same matrix instruction. AMD's for 32 x 32
    numbers add fewer inputs at a time than those for 16 x 16, and Triton chooses by the size of a block."""
    return {"matrix_instr_nonkdim": 16} if architecture(device).startswith("gfx") else {}
