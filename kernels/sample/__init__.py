"""Drawing a token: counter-based random numbers, penalties, filters, inverse cumulative draw."""

from kernels.dispatch import dispatched
from kernels.sample import reference
from kernels.sample.philox import philox4x32, uniform, uniforms
from kernels.sample.reference import draw, draw_filtered, greedy, logprobs, penalise
from kernels.sample.rows import Masks, RowParams

accept_drafts = dispatched(reference.accept_drafts)
sample = dispatched(reference.sample)

__all__ = [
    "Masks",
    "RowParams",
    "accept_drafts",
    "draw",
    "draw_filtered",
    "greedy",
    "logprobs",
    "penalise",
    "philox4x32",
    "sample",
    "uniform",
    "uniforms",
]
