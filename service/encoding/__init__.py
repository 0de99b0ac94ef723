"""Patches become rows, here or in another process or host: the handoff queue and the links to encoders."""
