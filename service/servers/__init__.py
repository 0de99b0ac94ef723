"""The processes of a server: what listens, how each starts, stops and is replaced."""
