"""Benchmarks. Each reports a ratio of both sides measured in turn in one run, and compares it with a limit of the
machine measured in the same run."""
