"""Which state slots a step reads and writes. Compiled code and torch operations store states in different forms, so
states are converted if one of them computes a step after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.batch import Batch


def slots_read(batch: Batch) -> Tensor:
    """Slots (int64) whose states the step's rows start from."""
    slots = [batch.slots_U]
    if batch.verify is not None:
        rows = batch.verify.tensors
        first = rows.accepted_V.clamp(min=1) - 1 if rows.slots_VT.shape[1] > 1 else torch.zeros_like(rows.accepted_V)
        slots.append(rows.slots_VT.gather(1, first.to(torch.int64)[:, None])[:, 0])
    if batch.scan is not None:
        slots.append(batch.scan.slots_R[batch.scan.initial_R.bool()])
    return _valid(slots)


def slots_written(batch: Batch) -> Tensor:
    """Slots (int64) in which torch operations store a state without reading the previous one."""
    slots: list[Tensor] = []
    if batch.verify is not None:
        slots.append(batch.verify.tensors.slots_VT.flatten())
    if batch.scan is not None:
        scan = batch.scan
        slots.append(scan.slots_R[~scan.initial_R.bool()])
        slots.append(torch.as_tensor(scan.window_saves, dtype=torch.int64).view(-1, 3)[:, 2])
    return _valid(slots)


def _valid(slots: list[Tensor]) -> Tensor:
    found = torch.cat([*(part.to(torch.int64) for part in slots), torch.empty(0, dtype=torch.int64)])
    return found[found >= 0].unique()
