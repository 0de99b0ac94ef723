"""Parts of `benchmarks.soak`, one module each; the frame says what a part is."""
