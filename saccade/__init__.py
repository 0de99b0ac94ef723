"""Saccade's Python client."""
