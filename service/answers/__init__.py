"""Turns requests into answers: admission, prompts, streaming, stop strings, detokenizing."""
