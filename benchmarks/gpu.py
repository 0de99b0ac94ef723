"""Speed of the kernels, both runners and the service on a GPU, as shares of the same GPU's measured limits.

    python -m benchmarks.gpu PART ... [--device cuda] [--scale full] [--seconds 450] [--out DIR]

ceilings  copy bandwidth and bf16 matmul rate, the limits that all parts are compared with (measured first in each part)
kernels   each kernel at the sizes of three decoders and two vision towers, compared with torch's attention and with the
          Triton kernels of mamba-ssm and vLLM (`make peers`) where they compute the same
runners   decode steps of an 8B-class model by batch size, with the lower bound (weights + states + KV over bandwidth)
          and the time in which no kernel ran; the vision tower at 8,192 rows; its graphs against eager calls at 1 to 16
          images
service   `benchmarks.compare` against transformers on the same GPU at 1, 8 and 64 requests, if its version knows this
          family (`make peers`); a server with the embedded model at 1, 8 and 64 callers: output tokens/s, time to first
          token

Each part writes DATE-gpu-PART.json into DIR, and rewrites it after each measurement. After `--seconds` it begins no
further measurement, and the file lists those left out. Failed measurements are stored with their errors, and the exit
status is 1. The last line on stdout is JSON. `--device cpu --scale tiny` tests the program on any machine; its numbers
have no meaning.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence

import torch

from benchmarks import machine
from benchmarks.gpu_kernels import part_kernels
from benchmarks.gpu_runners import part_runners
from benchmarks.gpu_service import part_service
from benchmarks.gpu_setting import Record, Setting, argument_parser, measure_ceilings
from benchmarks.record import path_of

PARTS: dict[str, Callable[[Setting, dict[str, float], Record], None]] = {
    "ceilings": lambda setting, ceilings, record: None,
    "kernels": part_kernels,
    "runners": part_runners,
    "service": part_service,
}


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a measurement failed."""
    parser = argument_parser(__doc__, seconds=450.0)
    parser.add_argument(
        "parts", nargs="+", metavar="PART", choices=list(PARTS), help=f"parts to run: {', '.join(PARTS)}"
    )
    arguments = parser.parse_args(argv)
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: no GPU found; --device cpu --scale tiny needs none")
    setting = Setting(arguments.device, arguments.scale)
    arguments.out.mkdir(parents=True, exist_ok=True)
    ceilings = measure_ceilings(setting)
    print(f"ceilings: {ceilings}", file=sys.stderr, flush=True)
    results = []
    for name in arguments.parts:
        head = {
            "benchmark": f"gpu-{name}", "scale": arguments.scale, "machine": machine.describe() | machine.gpu(),
            "ceilings": ceilings,
        }  # fmt: skip
        path = arguments.out / path_of(f"gpu-{name}").name
        record = Record(path, head, arguments.seconds)
        try:
            PARTS[name](setting, ceilings, record)
        except Exception:
            record.result["errors"][name] = traceback.format_exc()[-4000:]
            print(record.result["errors"][name], file=sys.stderr, flush=True)
        record.write()
        results.append(record.result)
    print(json.dumps(results))
    return int(any(result["errors"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
