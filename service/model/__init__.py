"""Reads checkpoint directories: configuration, weights, tokenizer, chat template; and writes quantised copies."""
