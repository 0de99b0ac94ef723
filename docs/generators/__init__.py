"""One module for each kind of generated documentation. Public functions without arguments return the text of a part."""

from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent
CHECKOUT = DOCS.parent
