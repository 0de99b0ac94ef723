"""Formats of quantised checkpoints: which tensors make one weight, and whether config.json agrees.

`tensors` decides by the tensors that are there, never by a list in a configuration; `declared` reads what the
configuration says, and `agree` compares the two.
"""
