"""One folder per operation: the maths (README.md), a torch reference, and a Triton kernel behind the same signature."""
