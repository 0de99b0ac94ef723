"""`saccade convert MODEL.gguf OUT [--mmproj FILE] [--weights FORM]`: the servable model directory of a GGUF file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.weight_forms import FORMS
from service.commands.plan import size
from service.common.config import ConfigError
from service.model.modelconfig import COMPUTE_DTYPES

if TYPE_CHECKING:
    from service.model.gguf.convert import Converted


def main(argv: Sequence[str]) -> int:
    """`saccade convert MODEL.gguf OUT [--mmproj FILE] [--weights FORM] [--dtype bfloat16|float32]`"""
    parser = argparse.ArgumentParser("saccade convert", description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file; of a model that is split, the first of its files")
    parser.add_argument("out", type=Path, help="directory to write, which must be empty if it exists")
    parser.add_argument("--mmproj", type=Path, metavar="FILE", help="the GGUF file of the model's vision tower")
    parser.add_argument(
        "--dtype", choices=COMPUTE_DTYPES[::-1], default="bfloat16",
        help="dtype of quantised weights that this server has no format for; float32 is exact and takes twice the "
        "memory (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--weights", choices=FORMS,
        help="quantise weights of the decoder's linear layers again, to this form, if they have a type that this "
        "server has no format for; the errors are printed and reported (default: they get --dtype)",
    )  # fmt: skip
    arguments = parser.parse_args(list(argv))
    try:
        import torch

        from service.model.gguf.convert import convert
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "gguf":
            raise
        raise ConfigError("gguf is not installed: pip install 'saccade-server[gguf]'") from None
    dtype = getattr(torch, arguments.dtype)
    _print(arguments.out, convert(arguments.model, arguments.mmproj, arguments.out, dtype, arguments.weights))
    return 0


def _print(out: Path, converted: Converted) -> None:
    from service.model.gguf.convert import REPORT

    before, after = (sum(getattr(kind, name) for kind in converted.kinds.values()) for name in ("before", "after"))
    print(f"{out}: {converted.family}, {size(after)} of weights instead of {size(before)}")
    for (stored, form), kind in sorted(converted.kinds.items(), key=lambda item: -item[1].before):
        how = "quantised again" if form in FORMS else "rounded"
        errors = f"{how}: relative error {kind.rounding.relative:.1e}, of a weight at most {kind.error:.1e}"
        said = errors if kind.error else "unchanged"
        print(f"  {kind.tensors} weights of {stored}, {size(kind.before)} -> {form}, {size(kind.after)}; {said}")
    for setting in converted.defaults:
        print(f"not in the file, so as the released models have it: {setting}")
    if converted.unused:
        print(f"not used: {len(converted.unused)} tensors")
    print(f"A server takes {size(converted.served)} of memory for weights; `saccade plan {out}` shows the rest.")
    print(f"errors of all weights: {out / REPORT}")
