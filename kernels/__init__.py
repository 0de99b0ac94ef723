"""Kernels, one folder per operation: the maths (README.md), a torch reference, and a Triton kernel with the same
signature."""
