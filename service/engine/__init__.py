"""The engine: rows and token ids become tokens; its process boundary and its supervision."""
