"""Drawing a token: counter-based random numbers, penalties, filters, inverse cumulative draw."""

from kernels.sample.philox import Purpose, philox4x32, uniform
from kernels.sample.reference import draw, draw_filtered, greedy, logprobs, penalise

__all__ = ["Purpose", "draw", "draw_filtered", "greedy", "logprobs", "penalise", "philox4x32", "uniform"]
