"""Rows and token ids become tokens: the engine, its process boundary and its supervision."""
