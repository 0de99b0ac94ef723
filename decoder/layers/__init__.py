"""Layers that decoders are made of: for each kind its description, its weights, its memory, and the layer itself."""
