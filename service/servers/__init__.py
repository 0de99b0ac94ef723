"""The processes of a server: how each starts, listens, stops and is replaced."""
