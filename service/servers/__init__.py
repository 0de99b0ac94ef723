"""The processes of a server: which of them listen, how each starts, stops and is replaced."""
