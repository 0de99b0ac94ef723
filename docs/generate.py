"""Writes the parts of the README and of the documentation that are generated from the sources.

A part is between `<!-- begin NAME: written by docs/generate.py -->` and `<!-- end NAME -->`; `PARTS` has the function
for each name. Numbers that are followed by a comment with a result and a key are filled in by generators/results.py,
and generators/diagram.py draws architecture.svg. The causes and fixes of errors are in generators/errors.toml.

`python docs/generate.py [FOLDER]` writes into FOLDER, by default over the pages themselves. `make protos` runs it too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from generators import diagram, errors, gpu, grpc, http, metrics, options, results, sdk, summary  # noqa: E402

PARTS: dict[str, Callable[[], str]] = {
    "services": grpc.services,
    "grpc reference": grpc.reference,
    "http reference": http.http_reference,
    "reasons by code": errors.reasons,
    "reasons": errors.troubleshooting,
    "methods": sdk.methods,
    "exceptions": sdk.client_errors,
    "options": options.options,
    "options of http": options.http_options,
    "metrics": metrics.metrics,
    "headline": results.headline,
    "comparison": results.overview,
    "processors beside vllm": summary.beside_vllm,
    "processors beside llama.cpp": summary.beside_llamacpp,
    "other models": summary.others,
    "int8 activations": summary.int8_activations,
    "int4 activations": summary.int4_activations,
    "a processor without bf16 instructions": results.without_bf16,
    "a zen 5 processor": results.zen5,
    "a zen 4 processor": results.zen4,
    "a processor with amx": results.amx,
    "a processor with avx2 alone": results.avx2,
    "memory": results.memory,
    "contexts": results.contexts,
    "load over http": results.http_load,
    "drafts": results.drafts,
    "qwen3_5 beside vllm": results.qwen_vllm,
    "qwen3_5 beside llama.cpp": results.qwen_llamacpp,
    "lfm2_vl beside vllm": results.lfm_vllm,
    "kernels on a gpu": gpu.kernels,
    "products on a gpu": gpu.products,
}
_BEGIN = re.compile(r"<!-- begin (.+): written by docs/generate\.py -->\n")


def filled(text: str) -> str:
    """The text of a page with its parts and numbers filled in. ValueError for an unknown part or one without an end."""
    for begin in _BEGIN.finditer(text):
        name, end = begin[1], f"<!-- end {begin[1]} -->"
        if name not in PARTS or end not in text:
            raise ValueError(f"{begin[0].strip()}: there is no such part, or no {end}")
        before, _, rest = text.partition(begin[0])
        text = f"{before}{begin[0]}\n{PARTS[name]().strip()}\n\n{end}{rest.partition(end)[2]}"
    return results.fill_numbers(text)


def main(folder: Path | None) -> None:
    """Writes the README and all pages that have generated parts or numbers into `folder`, or in place if it is None."""
    for path in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        text = path.read_text("utf-8")
        if _BEGIN.search(text) or "<!-- = " in text:
            (folder / path.name if folder else path).write_text(filled(text), "utf-8")
    ((folder or DOCS) / "architecture.svg").write_text(diagram.svg(), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
