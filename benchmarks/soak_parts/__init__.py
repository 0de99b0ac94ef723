"""Parts of `benchmarks.soak`, one module each; benchmarks/soak.py documents what a part is."""
