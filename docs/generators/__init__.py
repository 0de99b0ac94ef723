"""One module for each kind of generated documentation. Functions without arguments return Markdown."""

from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent
CHECKOUT = DOCS.parent
