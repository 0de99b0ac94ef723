"""`saccade quantize MODEL OUT --weights int8|int4|fp8|nvfp4`: a smaller copy of a checkpoint, which `serve` reads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from decoder.config import WEIGHT_KINDS
from service.common.config import EngineOptions
from service.model.checkpoint import open_checkpoint
from service.model.hub import fetched
from service.model.quantise import quantise_checkpoint


def main(argv: Sequence[str]) -> int:
    """`saccade quantize MODEL OUT --weights int8|int4|fp8|nvfp4`"""
    parser = argparse.ArgumentParser("saccade quantize", description=__doc__)
    parser.add_argument(
        "model", help="'demo', a checkpoint directory, or a hub id, which is downloaded where it has to be"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model that is named by its hub id")
    parser.add_argument("out", type=Path, help="directory to write; absent or empty")
    parser.add_argument("--weights", choices=WEIGHT_KINDS, required=True)
    arguments = parser.parse_args(list(argv))
    options = fetched(EngineOptions(model=arguments.model, revision=arguments.revision))
    checkpoint = open_checkpoint(options.model, options.revision)
    sizes = quantise_checkpoint(checkpoint, arguments.out, arguments.weights)
    print(f"{arguments.out}: {sizes['after'] / 1e6:.1f} MB of weights instead of {sizes['before'] / 1e6:.1f} MB")
    return 0
