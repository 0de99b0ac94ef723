"""`saccade quantize MODEL OUT --weights int8|int8-32|int4|int4-32|fp8|nvfp4`: a smaller copy of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from decoder.config import WEIGHT_KINDS
from kernels.cores import available_cores
from service.common.config import EngineOptions
from service.model.checkpoint import open_checkpoint
from service.model.hub import fetched
from service.model.quantise import FORMATS, REPORT, quantise_checkpoint


def main(argv: Sequence[str]) -> int:
    """`saccade quantize MODEL OUT --weights int8|int8-32|int4|int4-32|fp8|nvfp4`"""
    parser = argparse.ArgumentParser("saccade quantize", description=__doc__)
    parser.add_argument(
        "model",
        help="'demo', a checkpoint directory, or a Hugging Face hub id, which is downloaded if it is not cached",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model given by its hub id")
    parser.add_argument("out", type=Path, help="directory to write, which must be empty if it exists")
    parser.add_argument("--weights", choices=WEIGHT_KINDS, required=True, help="format of the quantised weights")
    parser.add_argument(
        "--format", choices=FORMATS, default=FORMATS[0],
        help="layout of the files: the server's own, or compressed-tensors (for all forms but nvfp4), which vLLM reads "
        "too (default: %(default)s)",
    )  # fmt: skip
    arguments = parser.parse_args(list(argv))
    torch.set_num_threads(available_cores().usable)
    options = fetched(EngineOptions(model=arguments.model, revision=arguments.revision))
    checkpoint = open_checkpoint(options.model, options.revision)
    written = quantise_checkpoint(checkpoint, arguments.out, arguments.weights, arguments.format)
    print(f"{arguments.out}: {written.after / 1e6:.1f} MB of weights instead of {written.before / 1e6:.1f} MB")
    print(f"relative error of {len(written.errors)} weights: mean {written.mean_error:.4f}; the largest:")
    for name, error in sorted(written.errors.items(), key=lambda item: -item[1])[:5]:
        print(f"  {error:.4f}  {name}")
    print(f"errors of all weights: {arguments.out / REPORT}")
    return 0
