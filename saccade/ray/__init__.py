"""Offline inference with Ray Data (`pip install 'saccade[ray]'`): `Generate` for `Dataset.map_batches`, and the job of
`saccade batch SOURCE OUT --ray`."""

from __future__ import annotations

from saccade.ray.generate import Generate
from saccade.ray.job import RayJob, RaySummary, run_ray_job
from saccade.ray.rows import Prices, RowFormat

__all__ = ["Generate", "Prices", "RayJob", "RaySummary", "RowFormat", "run_ray_job"]
