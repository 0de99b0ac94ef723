"""Kinds of decoder layers: for each its description, weights, memory, and implementation."""
