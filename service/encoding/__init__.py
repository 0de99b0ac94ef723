"""Turns patches into rows, in this process, another process or another host: the handoff queue and the links to
encoders."""
