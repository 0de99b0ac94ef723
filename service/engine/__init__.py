"""The engine: turns rows and token ids into tokens; its process boundary and its supervision."""
