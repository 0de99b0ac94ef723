"""Formats of quantised checkpoints: which tensors make one weight, and whether config.json agrees.

`tensors` decides by the tensors in the files, never by a list in a configuration. `declared` reads what the
configuration says, and compares it with the tensors.
"""
