"""`saccade quantize MODEL OUT --weights int8|int4`: a smaller copy of a checkpoint, which `serve` reads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from service.model.checkpoint import open_checkpoint
from service.model.quantise import quantise_checkpoint


def main(argv: Sequence[str]) -> int:
    """`saccade quantize MODEL OUT --weights int8|int4`"""
    parser = argparse.ArgumentParser("saccade quantize", description=__doc__)
    parser.add_argument(
        "model", help="'demo', a checkpoint directory, or a hub id that the local Hugging Face cache holds"
    )
    parser.add_argument("out", type=Path, help="directory to write; absent or empty")
    parser.add_argument("--weights", choices=["int8", "int4"], required=True)
    arguments = parser.parse_args(list(argv))
    sizes = quantise_checkpoint(open_checkpoint(arguments.model), arguments.out, arguments.weights)
    print(f"{arguments.out}: {sizes['after'] / 1e6:.1f} MB of weights instead of {sizes['before'] / 1e6:.1f} MB")
    return 0
