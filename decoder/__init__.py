"""The decoder runner: scheduler, state arena, hybrid model of recurrent and attention layers, sampling."""
