"""Measurements: each a ratio from one run with both sides in turn, held against a ceiling measured in the same run."""
