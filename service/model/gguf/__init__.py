"""Converts GGUF files, in which llama.cpp stores models, to model directories."""
