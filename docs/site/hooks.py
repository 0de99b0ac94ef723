"""What the site's build adds to MkDocs: it also publishes files outside of docs/ to which pages link.

In the repository a link to `../deploy/kubernetes/replicas.yaml` leads to that file, on the site to a copy of it below
`source/`. A link to a folder, to another page, or to nothing is a warning; `mkdocs build --strict` makes it an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

CHECKOUT = Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(#[^)]*)?\)")

log = get_plugin_logger(__name__)


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the linked files as they are."""
    for page in list(files.documentation_pages()):
        for path, _ in OUTSIDE.findall(page.content_string):
            if not (CHECKOUT / path).is_file() or path.endswith(".md"):
                log.warning("%s links to ../%s: not a file that can be published as it is", page.src_uri, path)
            elif files.get_file_from_path(f"source/{path}") is None:
                files.append(File.generated(config, f"source/{path}", abs_src_path=str(CHECKOUT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Points those links to the copies."""
    return OUTSIDE.sub(r"](source/\1\2)", markdown)
