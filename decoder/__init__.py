"""The decoder runner: scheduler, state arena, hybrid Mamba-2 model, sampling."""
